"""OpenVLA's POST /act, in both dialects."""

import json

import numpy as np
from served import wanted
from served_http import array, picture, talk


def test_openvla_gets_one_action_and_oft_the_chunk():
    async def test(server, session, post):
        status, found, headers = await post("/act", {"image": picture(9), "instruction": "push", "unnorm_key": "x"})
        assert status == 200 and (array(found) == wanted(9, "push")[0]).all()
        assert headers["X-Policy-Version"] == "0"
        status, found, _ = await post("/act", {"full_image": picture(9), "instruction": "push"})
        assert status == 200 and (np.stack([array(each) for each in found]) == wanted(9, "push")).all()
        double = {"encoded": json.dumps({"image": picture(9), "instruction": "push"})}
        status, text, _ = await post("/act", double)
        assert isinstance(text, str) and (array(json.loads(text)) == wanted(9, "push")[0]).all()

    talk("act", test)


def test_act_says_what_is_wrong():
    async def test(server, session, post):
        cases = {
            "": "wire-message",
            "[1]": "wire-observation",
            json.dumps({"full_image": picture(1)}): "wire-observation",
            json.dumps({"full_image": picture(1) | {"dtype": "|O"}, "instruction": ""}): "wire-array",
            json.dumps({"encoded": "{"}): "wire-message",
        }
        for body, code in cases.items():
            status, found, _ = await post("/act", body)
            assert status == 422 and code in found["error"]
        status, found, _ = await post("/act", {"full_image": picture(1), "instruction": "fail"})
        assert status == 500 and "secret" not in found["error"]
        status, found, _ = await post("/act", b"x" * (2**20 + 1))
        assert status == 413 and "wire-too-large" in found["error"]
        assert (await post("/act", {"image": picture(1), "instruction": ""}))[0] == 200

    talk("act", test, max_message_mb=1)
