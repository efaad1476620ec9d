"""Action bins, statistics, images, tokenizer, sampling: against hand-computed values, numpy and Pillow."""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from expect import raises_code
from PIL import Image
from tokenizers import Tokenizer, models

from embodrl.errors import CheckpointError
from embodrl.models.common.action_bins import ActionBins
from embodrl.models.common.chat import TokenRules
from embodrl.models.common.config_file import fields_of
from embodrl.models.common.images import jpeg_round_trip, resize_bicubic, resize_lanczos
from embodrl.models.common.norm_stats import choose_stats, identity_stats, stats_sets
from embodrl.models.common.sampling import (
    TextSampling,
    action_entropy,
    draw,
    exponential_noise,
    log_distribution,
    penalised,
    smoothed_targets,
)
from embodrl.models.common.tokenizer import PromptTokenizer, tiny_tokenizer
from embodrl.models.openvla.processing import PROMPT
from embodrl.types import SamplingParams


class TestActionBins:
    bins = ActionBins(32000)

    @pytest.mark.parametrize(
        ("value", "token"), [(-1.0, 31999), (-7.0, 31999), (1.0, 31744), (9.0, 31744), (0.9999, 31745), (0.0, 31872)]
    )
    def test_public_ids(self, value, token):
        assert self.bins.encode(np.array([value])).tolist() == [token]

    def test_centers(self):
        width = 2 / 255
        assert self.bins.decode(np.array([31999]))[0] == pytest.approx(-1 + width / 2)
        assert self.bins.decode(np.array([31745]))[0] == pytest.approx(1 - width / 2)

    def test_the_two_last_ids_mean_the_same(self):
        first, second, third = self.bins.decode(np.array([31744, 31745, 31746]))
        assert first == second != third

    def test_round_trip_is_within_half_a_bin(self):
        values = np.random.default_rng(0).uniform(-1, 1, 1000)
        assert np.abs(self.bins.decode(self.bins.encode(values)) - values).max() <= 1 / 255 + 1e-12

    def test_ids_that_are_no_actions_are_clipped(self):
        assert self.bins.decode(np.array([5, 32010])).tolist() == [self.bins.centers[254], self.bins.centers[0]]

    def test_tensors_agree_with_numpy(self):
        tokens = np.arange(31744, 32000)
        values = self.bins.value_of_index(self.bins.index(torch.from_numpy(tokens)))
        np.testing.assert_allclose(values.numpy(), self.bins.decode(tokens), atol=1e-7)


class TestStats:
    table = {  # noqa: RUF012
        "bridge": {"action": {"q01": [-2.0, 0.0], "q99": [4.0, 1.0], "mask": [True, False]}},
        "libero_no_noops": identity_stats(2),
    }

    def test_by_hand(self):
        stats = choose_stats(stats_sets(fields_of(self.table, "x")), "bridge", 2, "x")
        np.testing.assert_allclose(stats.unnormalize(np.array([[0.5, 0.25]])), [[2.5, 0.25]])
        np.testing.assert_allclose(stats.normalize(np.array([[2.5, 0.25], [9.0, 3.0]])), [[0.5, 0.25], [1.0, 1.0]])

    def test_no_noops_is_tried(self):
        assert choose_stats(stats_sets(fields_of(self.table, "x")), "libero", 2, "x").key == "libero_no_noops"

    def test_errors_list_the_keys(self):
        with raises_code("statistics-missing", CheckpointError, "bridge", "libero_no_noops"):
            choose_stats(stats_sets(fields_of(self.table, "x")), "brigde", 2, "x")
        with raises_code("statistics-choice", CheckpointError, 2, "model.unnorm_key"):
            choose_stats(stats_sets(fields_of(self.table, "x")), None, 2, "x")
        with raises_code("statistics-size", CheckpointError, "2", "7"):
            choose_stats(stats_sets(fields_of(self.table, "x")), "bridge", 7, "x")


class TestImages:
    def test_lanczos_equals_pillow(self):
        images = np.random.default_rng(1).integers(0, 256, (2, 40, 56, 3), dtype=np.uint8)
        for size in (24, 70):
            want = [np.asarray(Image.fromarray(i).resize((size, size), Image.Resampling.LANCZOS)) for i in images]
            found = resize_lanczos(torch.from_numpy(images), size, size).numpy()
            assert np.array_equal(found, np.stack(want))

    def test_jpeg_loses_little_of_smooth_pictures_and_colour_of_sharp_ones(self):
        ramp = np.linspace(0, 255, 32)
        smooth = np.stack([np.add.outer(ramp / 2, ramp / 2)] * 3, axis=-1).astype(np.uint8)[None]
        stripes = np.zeros((1, 32, 32, 3), np.uint8)
        stripes[:, :, ::2, 0] = 255
        away = [np.abs(jpeg_round_trip(images).astype(int) - images).mean() for images in (smooth, stripes)]
        assert away[0] < 1.0 and away[1] > 20.0  # colour has half the resolution

    @pytest.mark.parametrize(
        ("height", "width", "target"), [(64, 64, 224), (480, 640, 224), (256, 320, 64), (37, 100, 64), (32, 32, 32)]
    )
    def test_resize_equals_pillow(self, height, width, target):
        images = np.random.default_rng(1).integers(0, 256, (2, height, width, 3), dtype=np.uint8)
        want = [np.asarray(Image.fromarray(i).resize((target, target), Image.Resampling.BICUBIC)) for i in images]
        assert np.array_equal(resize_bicubic(torch.from_numpy(images), target, target).numpy(), np.stack(want))


class TestTokenizer:
    @pytest.mark.parametrize("text", ["push the cube", "Ünïcode 漢字 \x00 🤖", "", "take\ttabs\n"])
    def test_any_text_survives(self, text):
        tokenizer = tiny_tokenizer()
        ids = tokenizer.encode(text)
        assert ids[0] == 1 and ids[-1] == tokenizer.prompt_end_id
        assert tokenizer.decode(ids[:-1]) == text

    def test_prompts_are_short(self):
        tokenizer = tiny_tokenizer()
        assert len(tokenizer.encode(PROMPT.format(instruction="push the cube to the red and white target"))) <= 26

    def test_end_is_not_doubled(self):
        tokenizer = tiny_tokenizer()
        assert tokenizer.encode("push ").count(tokenizer.prompt_end_id) == 1

    def test_vocabulary_is_a_multiple_of_64(self):
        assert tiny_tokenizer().vocab_size % 64 == 0

    def test_wrong_files_are_refused(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text("{}")
        with raises_code("policy-file", CheckpointError):
            PromptTokenizer(tmp_path / "tokenizer.json", 1, 2)
        with raises_code("policy-file", CheckpointError):
            PromptTokenizer(tmp_path / "none.json", 1, 2)

    def test_a_tokenizer_without_the_end_is_refused(self, tmp_path):
        tiny_tokenizer().save(tmp_path)
        with raises_code("tokenizer-mismatch", CheckpointError, "29871"):
            PromptTokenizer(tmp_path / "tokenizer.json", 1, 29871)

    def test_one_of_the_same_size_with_other_ids_is_refused(self, tmp_path):
        """Mistral's has 32000 ids as Llama's, and its blank at another place."""
        for blank in (28705, 29871):
            ids = {f"t{i}": i for i in range(32000) if i != blank} | {"\u2581": blank}
            Tokenizer(models.WordLevel(ids, unk_token="t0")).save(str(tmp_path / "tokenizer.json"))
            with nullcontext() if blank == 29871 else raises_code("tokenizer-mismatch", CheckpointError, "28705"):
                PromptTokenizer(tmp_path / "tokenizer.json", 1, 29871)


class TestSampling:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])

    def test_by_hand(self):
        logp = log_distribution(self.logits, SamplingParams(temperature=2.0))
        weights = [math.exp(x / 2) for x in (2, 1, 0, -1)]
        np.testing.assert_allclose(logp.exp()[0].numpy(), np.array(weights) / sum(weights), rtol=1e-6)

    def test_top_k(self):
        logp = log_distribution(self.logits, SamplingParams(1.0, top_k=2))
        total = math.exp(2) + math.exp(1)
        np.testing.assert_allclose(logp.exp()[0].numpy(), [math.exp(2) / total, math.exp(1) / total, 0, 0], rtol=1e-6)

    @pytest.mark.parametrize(
        ("top_p", "kept"),
        [(0.0, [0.5]), (0.5, [0.5]), (0.51, [0.5, 0.25]), (0.75, [0.5, 0.25]), (0.8, [0.5, 0.25, 0.15]), (1.0, None)],
    )
    def test_top_p(self, top_p, kept):
        probabilities = [0.1, 0.5, 0.15, 0.25]
        logp = log_distribution(torch.tensor(probabilities).log(), TextSampling(rules=TokenRules(top_p)))
        found = probabilities if kept is None else [p if p in kept else 0.0 for p in probabilities]
        np.testing.assert_allclose(logp.exp().numpy(), np.array(found) / sum(found), rtol=1e-5)

    def test_top_p_is_of_what_top_k_and_temperature_leave(self):
        logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
        # Of the first three: 4/9, 3/9 and 2/9. Their squares: 16/29, 9/29 and 4/29.
        for temperature, weights in ((1.0, [4, 3, 0, 0]), (0.5, [16, 0, 0, 0])):
            logp = log_distribution(logits, TextSampling(temperature, 3, TokenRules(0.5)))
            np.testing.assert_allclose(logp.exp().numpy(), np.array(weights) / sum(weights), rtol=1e-5)

    def test_penalties_by_hand(self):
        logits = torch.tensor([[2.0, 1.0, -math.inf, -1.0], [0.0, 0.0, 0.0, 0.0]])
        tokens = torch.tensor([[0, 0, 3], [1, 9, 9]])  # 9 is padding
        mask = torch.tensor([[True, True, True], [True, False, False]])
        rules = TokenRules(presence_penalty=0.5, frequency_penalty=0.25)
        found = penalised(logits, tokens, mask, TextSampling(rules=rules))
        assert found.tolist() == [[1.0, 1.0, -math.inf, -1.75], [0.0, -0.75, 0.0, 0.0]]
        assert penalised(logits, tokens, mask, SamplingParams()) is logits
        assert penalised(logits, tokens[:, :0], mask[:, :0], TextSampling(rules=rules)).tolist() == logits.tolist()

    def test_a_taken_bin_stays_in_the_support(self):
        taken = log_distribution(self.logits, SamplingParams(1.0, top_k=2), torch.tensor([3]))
        assert torch.isfinite(taken[0]).tolist() == [True, True, False, True]

    def test_entropy_of_equal_bins(self):
        entropy = action_entropy(torch.zeros(1, 256), torch.tensor([0]), SamplingParams(0.5, top_k=8))
        assert entropy.item() == pytest.approx(math.log(8), abs=0.13)  # the taken bin may be a ninth
        assert action_entropy(torch.zeros(1, 256), torch.tensor([0]), SamplingParams()).item() == pytest.approx(
            math.log(256), rel=1e-5
        )

    def test_entropy_gradient_is_finite_with_top_k(self):
        logits = torch.randn(3, 16, requires_grad=True)
        action_entropy(logits, torch.zeros(3, dtype=torch.long), SamplingParams(1.0, top_k=4)).sum().backward()
        assert logits.grad is not None and torch.isfinite(logits.grad).all()

    def test_frequencies_of_draws(self):
        count = 20000
        noise = exponential_noise((count, 4), torch.Generator().manual_seed(0), torch.device("cpu"))
        drawn = draw(self.logits.expand(count, 4), SamplingParams(0.7), noise)
        want = (self.logits[0] / 0.7).softmax(0)
        np.testing.assert_allclose(drawn.bincount(minlength=4) / count, want, atol=0.012)

    def test_without_noise_the_most_probable(self):
        assert draw(self.logits, SamplingParams(), None).tolist() == [0]

    def test_smoothed_targets(self):
        table = smoothed_targets(256, 4.0, torch.device("cpu"))
        torch.testing.assert_close(table.sum(dim=1), torch.ones(256))
        assert (table[100, 104] / table[100, 100]).item() == pytest.approx(math.exp(-0.5), rel=1e-5)
        assert table[0, 0] > table[100, 100]
