"""One controller of a run, as a process: trains or resumes, and writes the weights that it ends with to OUT."""

import sys

from safetensors.torch import save_file

import embodrl
from embodrl.processes.ending import own_process

if __name__ == "__main__":
    own_process()
    out, config, *overrides = sys.argv[1:]
    result = embodrl.train(config, overrides)
    assert result.policy is not None
    save_file({name: tensor.contiguous() for name, tensor in result.policy.state_dict().items()}, out)
    sys.exit(result.exit_code)
