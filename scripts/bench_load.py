"""How much host memory loading takes beside the parameters, measured on a made-up checkpoint of several files.

    python scripts/bench_load.py                       # 1 GB in 4 files, on one device and on four
    python scripts/bench_load.py --layers 40 --tp-size 8

A line a number of devices: bytes of the parameters, the most that was resident above what was so before, less the
parameters, which a CPU keeps in host memory, and our mark: 1.3 times a file and the largest tensor. Each is measured
in a process of its own by what the kernel has counted (Linux only), mapped pages of the files included.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 5632, 32, 4, 64, 32_000


def write_checkpoint(directory: Path, layers: int, files: int) -> tuple[int, int]:
    """A Llama of random bfloat16, its tensors spread over files; bytes of the largest file and the largest tensor."""
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (MLP, HIDDEN),
            "mlp.up_proj": (MLP, HIDDEN),
            "mlp.down_proj": (HIDDEN, MLP),
        }.items():
            shapes[f"{prefix}{name}.weight"] = shape
    names, rng = list(shapes), np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    largest_file = 0
    for index, part in enumerate(np.array_split(np.arange(len(names)), files)):
        file = f"model-{index}.safetensors"
        tensors = {
            names[place]: rng.random(shapes[names[place]], np.float32).astype(ml_dtypes.bfloat16) for place in part
        }
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
        largest_file = max(largest_file, (directory / file).stat().st_size)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return largest_file, 2 * max(int(np.prod(shape)) for shape in shapes.values())


def measure(directory: str, tp_size: int) -> dict[str, int]:
    """Load the checkpoint in this process; bytes of its parameters, and of what was resident beside them at most."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jradix.mesh import tensor_mesh
    from jradix.model.checkpoint import open_checkpoint
    from jradix.model.config import ModelConfig
    from jradix.model.sharding import Sharding
    from jradix.model.weights import load_transformer

    checkpoint = open_checkpoint(directory)
    config = ModelConfig.from_hf(checkpoint.config)
    sharding = Sharding(config, tensor_mesh(tp_size))
    jax.block_until_ready(jnp.zeros(8, device=sharding.replicated) + 1)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    model = load_transformer(config, checkpoint, dtype=jnp.bfloat16, layer_loop="scan", sharding=sharding)
    peak = _resident("VmHWM")
    arrays = jax.tree.leaves(nnx.state(model))
    held = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
    return {"parameters": held, "beside": peak - before - held}


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if the mark is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10, help="of 88 MB")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--tp-size", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.measure, options.tp_size[0])))
        return 0
    met = True
    with tempfile.TemporaryDirectory() as directory:
        largest_file, largest_tensor = write_checkpoint(Path(directory), options.layers, options.files)
        mark = 1.3 * largest_file + largest_tensor
        print(f"{'devices':>7}{'parameters, MB':>16}{'beside them, MB':>17}{'mark, MB':>10}")
        for tp_size in options.tp_size:
            flags = f"--xla_force_host_platform_device_count={tp_size}"
            environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
            command: list[Any] = [sys.executable, __file__, "--measure", directory, "--tp-size", str(tp_size)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            met &= found["beside"] <= mark
            print(f"{tp_size:>7}{found['parameters'] / 1e6:>16.0f}{found['beside'] / 1e6:>17.0f}{mark / 1e6:>10.0f}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
