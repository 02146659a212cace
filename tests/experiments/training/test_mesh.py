"""How a run lies on several devices: errors that need none, and two processes of four devices each."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jax_sparse24 as s24
from experiments import launch
from experiments.cli import STOPPED
from experiments.config import Config, Mesh, Train
from experiments.data import text
from experiments.errors import UserError
from experiments.models import decoder
from experiments.models.parts import by_heads, with_columns
from experiments.training import loop
from experiments.training import mesh as meshes
from experiments.training.rundir import open_run
from experiments.training.step import Program, abstract_model
from tests.experiments.conftest import REPOSITORY


def test_sizes_of_a_mesh():
    assert meshes.sizes(Mesh(), 8) == {"dp": 8, "fsdp": 1, "tp": 1}
    assert meshes.sizes(Mesh(dp=2, fsdp=-1, tp=2), 8) == {"dp": 2, "fsdp": 2, "tp": 2}
    with pytest.raises(UserError, match=r"dp 2 \* fsdp 3 \* tp 1 = 6, but there are 8 .*--mesh.dp -1"):
        meshes.sizes(Mesh(dp=2, fsdp=3), 8)
    with pytest.raises(UserError, match=r"fsdp 3 \* tp 1 = 3 does not divide the 8 devices"):
        meshes.sizes(Mesh(fsdp=3), 8)
    with pytest.raises(UserError, match=r"mesh.dp and mesh.tp are both -1"):
        Mesh(tp=-1)
    with pytest.raises(UserError, match=r"mesh.fsdp must be positive, or -1 for the rest, got 0"):
        Mesh(fsdp=0)


def test_the_mesh_on_the_command_line(capsys):
    config = launch.parse(["configs/dense.py", "--mesh.fsdp", "4", "--mesh.dp", "1"]).config
    assert config.mesh == Mesh(dp=1, fsdp=4)
    with pytest.raises(SystemExit):
        launch.parse(["configs/dense.py", "--mesh.pp", "2"])
    assert "--mesh.tp" in capsys.readouterr().err  # the nearest


def abstract(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def test_what_the_mesh_does_not_divide():
    config = Config(
        model=decoder.Config(layers=2, d=24, f=40, heads=2, scan=True),
        data=text.Config(batch=8),
        train=Train(accumulate=2),
        method=s24.methods.FST(),
    )
    state = nnx.state(abstract_model(config))
    found = meshes.shardings(state, abstract(dp=1, fsdp=4, tp=2))
    ffn = found["blocks"]["ffn"]
    assert ffn["up"]["kernel"].get_value().spec == P(None, "fsdp", "tp")  # stacked layers are not cut
    assert ffn["down"]["state"]["mask"].get_value().spec == P(None, "tp", "fsdp")
    assert ffn["up"]["key"].get_value().spec == found["norm"]["scale"].get_value().spec == P()
    message = r"blocks.ffn.down.kernel of shape \(2, 40, 24\): axis 1, of size 40, into 3 .*--mesh.tp"
    with pytest.raises(UserError, match=message):
        meshes.shardings(state, abstract(dp=1, fsdp=1, tp=3))
    with pytest.raises(UserError, match=r"= 4 sequences\) must be a multiple of the 8 .*dp 4 \* fsdp 2"):
        meshes.check(config, abstract(dp=4, fsdp=2, tp=1))
    divides = pytest.raises(ValueError, match=r"2 heads .* do not divide into 4 shards .* --mesh.tp")
    with jax.sharding.use_abstract_mesh(abstract(dp=1, fsdp=1, tp=4)), divides:
        by_heads([jnp.zeros((24, 24))] * 3, heads=2, head=12)
    layer = s24.nn.Linear(24, 24, method=s24.methods.STE(), rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"heads of width 6 is not cut over tp.*multiple of 4, or --mesh.tp 1"
    ):
        with_columns(layer, jnp.zeros((1, 4, 24)), None, head=6)


@pytest.mark.parametrize(
    ("shape", "platform", "processes", "flags", "set_by_us"),
    [
        ((4, 1, 1), "gpu", 1, "", list(meshes.OVER_DP)),
        ((1, 1, 1), "gpu", 1, "", []),
        ((2, 2, 1), "gpu", 1, "", []),
        ((2, 1, 2), "gpu", 1, "", []),
        ((4, 1, 1), "gpu", 2, "", []),
        ((4, 1, 1), "cpu", 1, "", []),
        ((4, 1, 1), "gpu", 1, f"--{meshes.SCHEDULER}=true", []),
        ((4, 1, 1), "gpu", 1, "--xla_gpu_all_reduce_combine_threshold_bytes=1", [meshes.SCHEDULER]),
    ],
)
def test_xla_s_options_over_dp_alone(shape, platform, processes, flags, set_by_us, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    devices = [SimpleNamespace(platform=platform, process_index=n % processes) for n in range(np.prod(shape))]
    mesh = SimpleNamespace(
        devices=np.array(devices).reshape(shape),
        shape=dict(zip(("dp", "fsdp", "tp"), shape, strict=True)),
        size=len(devices),
    )
    assert meshes.compiler_options(mesh) == {name: meshes.OVER_DP[name] for name in set_by_us}


def test_xla_knows_the_options():
    jax.jit(lambda x: x).lower(1.0).compile(compiler_options=meshes.OVER_DP)


def test_steps_are_compiled_with_the_options_of_their_mesh(monkeypatch):
    """And with those that are given, which stand; a mesh without devices has none."""
    assert meshes.compiler_options(abstract(dp=2, fsdp=1, tp=1)) == {}
    monkeypatch.setattr(meshes, "compiler_options", lambda mesh: {"xla_of_a_mesh": 1, "xla_of_both": 1})
    config = Config(model=decoder.Config(layers=1, d=32, f=64, heads=2), data=text.Config(seq=8, batch=2))
    program = Program(config, {"xla_of_both": 2})
    assert program.compiler_options == {"xla_of_a_mesh": 1, "xla_of_both": 2}
    with pytest.raises(Exception, match="xla_of_a_mesh"):
        program.step(sparse=False)


def test_sums_of_bfloat16_at_which_xla_ends_the_process_are_refused(monkeypatch):
    """On CPUs alone, and unless the pass is left out that does it."""
    flag = "--xla_disable_hlo_passes=all-reduce-promotion"
    one = Config(model=decoder.Config(dtype="bfloat16"), data=text.Config(batch=8))
    cpus = meshes.make(Mesh(), jax.devices())
    devices = np.full((2, 1, 1), jax.devices()[0])
    two = jax.sharding.Mesh.__new__(jax.sharding.Mesh, devices, ("dp", "fsdp", "tp"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    with pytest.raises(UserError, match=rf"--model.dtype float32\), or put XLA_FLAGS={flag} before"):
        meshes.check(one, two)
    meshes.check(one, cpus)
    meshes.check(one, abstract(dp=2, fsdp=1, tp=1))
    meshes.check(dataclasses.replace(one, model=decoder.Config(dtype="float32")), two)
    monkeypatch.setenv("XLA_FLAGS", flag)
    meshes.check(one, two)


def test_xla_ends_the_process_at_sums_of_bfloat16():
    """Where it no longer does, nothing needs to be refused."""
    code = """if True:
        import jax, jax.numpy as jnp
        from jax.sharding import AxisType, PartitionSpec as P
        mesh = jax.make_mesh((2, 1), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
        options = {"in_specs": P("dp"), "out_specs": P(), "axis_names": {"dp"}, "check_vma": False}
        with jax.set_mesh(mesh):
            total = jax.shard_map(lambda x: jax.lax.psum(x, "dp"), **options)
            jax.jit(total)(jnp.ones(4, jnp.bfloat16)).block_until_ready()
    """
    for flag, ends in (("", True), (f"--xla_disable_hlo_passes={meshes.ABORTING_PASS}", False)):
        flags = f"--xla_force_host_platform_device_count=2 {flag}"
        options = {"env": os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, "capture_output": True}
        done = subprocess.run([sys.executable, "-c", code], **options)
        assert (done.returncode < 0) == ends, done.stderr[-2000:]


OPTIONS = [
    *("--method", "FST", "--method.dense-fraction", "0"),
    *("--train.accumulate", "2", "--data.batch", "8"),
    *("--train.steps", "100000", "--train.eval-every", "3", "--train.probe-every", "0", "--no-tune"),
    *("--train.monitor-every", "0", "--train.checkpoint-every", "0", "--train.eval-batches", "1"),
]


def losses(out):
    """Of all steps and evaluations, by kind and step."""
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {(row["kind"], row["step"]): row.get("loss", row.get("sparse")) for row in rows}


@pytest.mark.slow
def test_two_processes_are_stopped_and_one_goes_on(shared, tmp_path, monkeypatch):
    """A run of two processes with four devices each, cut over all axes of the mesh, and its second half on
    one device, has the losses of one that was always on one device, with the same draws."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    out = tmp_path / "run"
    command = [sys.executable, "-m", "experiments.launch", f"{shared / 'tiny.py'}:dense", *OPTIONS]
    command += ["--out", str(out), "--resume", "--mesh.fsdp", "2", "--mesh.tp", "2"]
    command += ["--coordinator", address, "--processes", "2", "--process"]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    options = {"cwd": REPOSITORY, "env": os.environ | {"XLA_FLAGS": flags}, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = [subprocess.Popen([*command, index], **options) for index in "01"]
    try:
        deadline = time.time() + 300
        while not ((out / "metrics.jsonl").exists() and ("train", 3) in losses(out)):
            ended = [process.poll() for process in processes]
            assert ended == [None, None] and time.time() < deadline, processes[0].communicate()
            time.sleep(0.1)
        processes[1].send_signal(signal.SIGTERM)  # one is enough: all agree on a step
        printed = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [STOPPED, STOPPED], printed
    (saved,) = [int(path.name) for path in (out / "checkpoints").iterdir()]
    assert f"Stopped and saved at step {saved}" in printed[0]

    config = dataclasses.replace(open_run(out), mesh=Mesh())
    assert config.method.stochastic
    monkeypatch.setattr(loop.StopSignal, "at", lambda self, step: step == saved + 4)
    resumed = loop.train(config, out, resume=True, show=False)
    whole = loop.train(config, tmp_path / "one", show=False)
    assert resumed.step == whole.step == saved + 4
    (one, other) = (losses(path) for path in (out, tmp_path / "one"))
    assert one.keys() - {("event", saved)} == other.keys() and ("eval", 3) in one
    for place in other.keys() - {("event", 0)}:
        np.testing.assert_allclose(one[place], other[place], rtol=1e-5, err_msg=str(place))
