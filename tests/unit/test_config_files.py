"""How files and options combine, the origin of each value, and mistakes with file and line."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import mmengine.config.config
import pytest
from runs import ROOT, TRAIN

from opensora_sp.cli import main
from opensora_sp.common.console import config_arguments
from opensora_sp.config import InferenceConfig, TrainConfig, load_train_config
from opensora_sp.config.config_file import read_config
from opensora_sp.config.launch_checks import check_launch
from opensora_sp.config.load import parse_override
from opensora_sp.config.optimizer_options import Optimizer
from opensora_sp.config.sections import (
    Dataset,
    PromptOptions,
    SequenceParallel,
    Validation,
)

TOO_SMALL = (
    "image_size = (4, 4)\nvae = dict(_delete_=True, type='VideoAutoencoderKL', from_pretrained='x')"
)
SEVERAL = "model = dict(num_heads=5)\nema_decay = 2\nsp_sise = 1"
BASE = TRAIN.format(manifest="clips.csv").lstrip()


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.py").write_text(BASE)
    return tmp_path


def write(folder: Path, text: str, name: str = "run.py") -> str:
    (folder / name).write_text(text)
    return name


def line_of(text: str, start: str) -> int:
    return next(
        number for number, line in enumerate(text.splitlines(), 1) if line.startswith(start)
    )


def refused(path: str, options: list[str] | None = None, load=load_train_config) -> str:
    with pytest.raises(ValueError) as error:
        load(path, options)
    return str(error.value)


def test_bases_deletion_and_variables(base: Path) -> None:
    write(base, "lr_schedule = 'cosine'\n", "more.py")
    text = """_base_ = ["base.py", "{{fileDirname}}/more.py"]
import os
from pathlib import Path
_steps = 3
outputs = "{{fileDirname}}/{{fileBasenameNoExtension}}"
optimizer = dict(betas=(0.5, 0.9))
vae = dict(_delete_=True, type="PatchPoolVAE")
model = dict(depth=_base_.model.depth + 1)
max_steps = 2 * _steps
seed = int(os.environ.get("NO_SUCH_SEED", "7"))
def helper(): pass
"""
    cfg = load_train_config(write(base, text))

    assert cfg.outputs == f"{base}/run" and cfg.lr_schedule == "cosine"
    assert (cfg.max_steps, cfg.seed) == (6, 7)
    assert cfg.optimizer.lr == 1e-3 and cfg.optimizer.betas == (0.5, 0.9)  # merged
    assert cfg.vae == {"type": "PatchPoolVAE"} and cfg.model["depth"] == 3
    assert cfg.model["num_heads"] == 3

    write(base, "_base_ = 'base.py'\nvalidation = dict(every=2, prompts=['a'])\n", "more.py")
    deleted = [f"{name} = dict(_delete_=True)" for name in ("optimizer", "validation")]
    gone = write(base, "\n".join(["_base_ = 'more.py'", *deleted]), "gone.py")
    for cfg in (load_train_config(gone), load_train_config(base / "more.py", deleted)):
        # The defaults again.
        assert cfg.optimizer.lr == 1e-4 and cfg.validation is None


def test_imports_work_wherever_the_environment_lies(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In some virtual environments mmengine takes no module for a builtin one: imports fail."""
    monkeypatch.setattr(mmengine.config.config, "_is_builtin_module", lambda name: False)
    write(base, "import os\n" + BASE, "base.py")
    path = write(
        base, "_base_ = 'base.py'\nimport os, math\nseed = math.floor(1.5)\noutputs = os.sep\n"
    )
    with pytest.raises(Exception):  # noqa: B017  # as users of mmengine meet it
        mmengine.config.Config.fromfile(path)
    assert (load_train_config(path).seed, load_train_config(path).outputs) == (1, "/")


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("sp_sise = 2", ["unknown key 'sp_sise'; *; did you mean 'sp_size'? [run.py:2]"]),
        ("model = dict(\n    hiden_size=4,\n)", ["'model.hiden_size'*'hidden_size'? [run.py:3]"]),
        ("dataset = dict(manifst='x')", ["unknown key 'dataset.manifst'*'manifest'? [run.py:2]"]),
        ("model = dict(hidden_size=25)", ["hidden_size 25 *num_heads: base.py:*size: run.py:2]"]),
        (TOO_SMALL, ["got 5 frames of 4x4 pixels*of (5, 0, 0)*[*image_size: run.py:2*]"]),
        ("optimizer = 3", ["in the place of an inherited dict (of base.py:*)*[run.py:2]"]),
        ("mask_ratios = dict(random=2)", ["that sum to 2; expected numbers*[run.py:2]"]),
        ("bucket_config = {'240p': {51: (1.0, 0)}}", ["is chosen at the start*[run.py:2]"]),
        ("epochs = 2", ["got max_steps 6 and epochs 2*[*epochs: run.py:2*]"]),
        ("model = dict(depth=7.5)", ["got model.depth = 7.5*valid integer*[run.py:2]"]),
        ("_base_ = 'run.py'", ["which is based on itself"]),
        ("seed = 1 / 0", ["ZeroDivisionError*[run.py:2]"]),
        (SEVERAL, ["num_heads 5*run.py:2]", "ema_decay = 2*run.py:3]", "'sp_sise'*run.py:4]"]),
        ("precision = 'fp64'\nepochs = 2", ["precision 'fp64'*run.py:2]", "epochs 2*run.py:3*]"]),
        ("text_encoder = dict(max_length=13)", ["13 over model.model_max_length 12"]),
    ],
)
def test_mistakes_are_reported_together_with_file_and_line(
    base: Path, text: str, messages: list[str]
) -> None:
    text = text if text.startswith("_base_") else "_base_ = 'base.py'\n" + text
    reported = refused(write(base, text + "\n"))
    for message in messages:
        pattern = ".*".join(re.escape(part) for part in message.split("*"))
        assert re.search(pattern, reported), reported


def test_a_mistake_in_a_base_is_reported_with_the_line_there(base: Path) -> None:
    write(base, BASE + "sp_sise = 2\n", "base.py")
    reported = refused(write(base, "_base_ = 'base.py'\nseed = 1\n"))
    assert f"[base.py:{line_of(BASE, 'ckpt_every') + 1}]" in reported
    write(base, "seed = 1\n", "more.py")
    write(base, BASE + "seed = 2\n", "base.py")
    reported = refused(write(base, "_base_ = ['base.py', 'more.py']\n"))
    assert "got 'seed' in two files" in reported and "more.py:1" in reported


def test_explain_prints_the_origin_of_each_value(base: Path, capsys: pytest.CaptureFixture) -> None:
    text = "_base_ = 'base.py'\nmodel = dict(\n    depth=4,\n)\n"
    text += "image_size = None\nresolution = '32x24'\n"
    main(["config", write(base, text), "--explain", "--cfg-options", "optimizer.lr=0.5", "seed=3"])
    reported = {}
    for line in capsys.readouterr().out.splitlines():
        setting, place = line.split("#", 1)
        key, shown = setting.split(" = ")
        reported[key] = (shown.strip(), place.strip())

    assert reported["model.depth"] == ("4", "run.py:3")
    assert reported["model.hidden_size"] == ("24", f"base.py:{line_of(BASE, '    type=')}")
    assert reported["sp_size"] == ("2", f"base.py:{line_of(BASE, 'sp_size')}")
    assert reported["optimizer.lr"] == ("0.5", "--cfg-options optimizer.lr=0.5")
    assert reported["optimizer.eps"] == ("1e-08", "default")
    assert reported["image_size"] == ("(32, 24)", "from resolution, run.py:6")
    assert reported["resolution"] == ("None", "used up for image_size, run.py:6")

    main(["config", "run.py"])
    (base / "dump.py").write_text(capsys.readouterr().out)
    assert load_train_config("dump.py") == load_train_config("run.py")
    with pytest.raises(SystemExit):
        main(["config", "run.py", "--cfg-options", "sp_sise=2"])
    assert "did you mean 'sp_size'" in capsys.readouterr().err


def test_the_docs_show_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)
    command, shown = re.findall(
        r"```(?:bash|text)\n(.*?)```", Path("docs/configs.md").read_text(), re.DOTALL
    )[:2]
    main(shlex.split(command)[1:])
    printed = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert {" ".join(line.split()) for line in shown.splitlines()} <= printed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x=a red fox, running", "a red fox, running"),
        ("x=[1, 'two', None, True]", [1, "two", None, True]),
        ("x={'a': (1.0, 2), 'b': {'c': -1}}", {"a": (1.0, 2), "b": {"c": -1}}),
        ("x=dict(_delete_=True, pool=(1, 2))", {"_delete_": True, "pool": (1, 2)}),
        ("x=None", None),
        ("x=false", False),
        ("x='False'", "False"),
        ("x=1e-3", 1e-3),
        ("x=", ""),
        ("x=a=b", "a=b"),
        ("x=__import__('os').system('touch bad')", "__import__('os').system('touch bad')"),
        ("x=open('bad', 'w')", "open('bad', 'w')"),
    ],
)
def test_options_are_data(base: Path, text: str, value: object) -> None:
    assert parse_override(text) == (["x"], value)
    assert not (base / "bad").exists()


def test_options_put_over_files(base: Path) -> None:
    write(base, BASE + "mask_ratios = dict(random=0.1)\n", "base.py")
    added = load_train_config(
        "base.py", ["mask_ratios.image_head=0.2", "optimizer.lr=2.0", "keep_last=none"]
    )

    assert added.mask_ratios == {"random": 0.1, "image_head": 0.2} and added.optimizer.lr == 2.0
    for whole in ("{'image_head': 0.2}", "dict(_delete_=True, image_head=0.2)"):
        changed = load_train_config("base.py", [f"mask_ratios={whole}"])
        assert changed.mask_ratios == {"image_head": 0.2}

    assert load_train_config("base.py", ["mask_ratios=None"]).mask_ratios is None
    assert "= 0.5 in the place of a dict (of base.py:" in refused("base.py", ["mask_ratios=0.5"])

    text = """_base_ = "base.py"
num_frames = image_size = batch_size = None
dataset = dict(type="VariableVideoText")
bucket_config = {"144p": {1: (1.0, 2), 6: (1.0, 1)}}
vae = dict(pool=(1, 16, 16))
"""
    changed = load_train_config(write(base, text), ["bucket_config.144p.6=(0.5, 3)"])
    assert changed.bucket_config["144p"][6] == (0.5, 3)

    reported = refused("base.py", ["sp_sise=2", "noequals", "seed=-1", "optimizer.lr=fast"])
    assert "noequals" in reported
    assert refused("base.py", ["seed=-1", "optimizer.lr=fast"]).count("--cfg-options") == 2


@pytest.mark.parametrize(
    "options",
    [
        ["outputs=a red fox"],
        ["optimizer.betas=[0.9, 0.99]"],
        ["validation={'every': 5, 'prompts': ['a fox']}"],
        ["vae={'type': 'PatchPoolVAE'}"],
    ],
)
def test_options_broken_by_a_launcher_are_recognised(base: Path, options: list[str]) -> None:
    """colossalai run joins its arguments with spaces for a shell to take apart again."""
    shell = subprocess.run(
        ["bash", "-c", "printf '%s\\n' " + " ".join(options)], capture_output=True, text=True
    )
    reported = refused("base.py", shell.stdout.splitlines())
    assert "start with torchrun, or write the value into a config file" in reported
    assert "colossalai run passes options on without quotes" in reported


def test_texts_broken_on_the_command_line_are_explained(capsys: pytest.CaptureFixture) -> None:
    parser = config_arguments()
    parser.add_argument("--prompt")
    given = parser.parse_args(["run.py", "--cfg-options", "a=1", "--cfg-options", "b=2"])
    assert given.cfg_options == ["a=1", "b=2"]
    with pytest.raises(SystemExit):
        parser.parse_args(["run.py", "--prompt", "a", "red", "fox"])
    assert "colossalai run passes options on without quotes" in capsys.readouterr().err


def test_processes_and_device_are_checked_together(base: Path) -> None:
    options = ["sp_size=3", "precision=fp16", "optimizer.type=HybridAdam", "kernels=triton"]
    cfg = load_train_config("base.py", options)
    with pytest.raises(ValueError) as error:
        check_launch(cfg, 4)
    for message in (
        "got sp_size 3 with 4 processes",
        "precision 'fp16' without CUDA",
        "'HybridAdam' without CUDA",
        "on a device of type 'cpu'",
    ):
        assert message in str(error.value)
    check_launch(load_train_config("base.py"), 4)


def test_stdit_takes_the_size_of_the_clips(base: Path) -> None:
    path = write(base, BASE.replace('type="STDiT3"', 'type="STDiT"'))
    assert load_train_config(path, ["image_size=(32, 24)"]).model["input_size"] == (5, 8, 6)
    assert "and model.input_size (5, 4, 4)" in refused(
        path, ["image_size=(32, 24)", "model.input_size=(5, 4, 4)"]
    )
    assert "got input_size (5, 7, 6) and patch_size (1, 2, 2)" in refused(path)


@pytest.mark.parametrize(
    "schema",
    [TrainConfig, InferenceConfig, Dataset, Optimizer, SequenceParallel, PromptOptions, Validation],
)
def test_every_key_is_described(schema: type) -> None:
    assert [name for name, field in schema.model_fields.items() if not field.description] == []


def test_lines_follow_later_statements(base: Path) -> None:
    text = "model = dict(depth=1)\nmodel['depth'] = 2\nmodel['num_heads'] = 3\n"
    text += "if True:\n    seed = 4\nvae, text_encoder = {'type': 'a'}, {}\n"
    draft = read_config(write(base, text))
    assert draft.values["model"] == {"depth": 2, "num_heads": 3}
    wanted = {("model", "depth"): 2, ("model", "num_heads"): 3, ("seed",): 5, ("vae", "type"): 6}
    for key, line in wanted.items():
        assert draft.origin(key) == f"run.py:{line}"


OVERRIDES = [
    ["scheduler.type=imported_by_name.X"],
    ["text_encoder.type=imported_by_name.X"],
    ["vae=dict(type='imported_by_name.X')"],
    ["allow_types=['imported_by_name.X']", "vae.type=imported_by_name.X"],
]


@pytest.mark.parametrize("options", OVERRIDES)
def test_an_override_imports_nothing(
    base: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    write(base, "open('imported', 'w')\nX = print\n", "imported_by_name.py")
    monkeypatch.syspath_prepend(str(base))
    assert "on the command line" in refused("base.py", options)
    assert not (base / "imported").exists()


def test_an_override_runs_no_function(base: Path) -> None:
    """``dict(type="os.system", ...)`` called it, with a command of the command line's choice."""
    message = refused("base.py", ["scheduler=dict(type='os.system', command='touch executed')"])
    assert "got scheduler.type 'os.system' on the command line" in message
    assert not (base / "executed").exists()


def test_an_override_may_name_what_a_config_file_allows(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(base, "from opensora_sp.encoders import PatchPoolVAE as Mine\n", "own_vae.py")
    monkeypatch.syspath_prepend(str(base))
    allowing = write(base, "_base_ = ['base.py']\nallow_types = ('own_vae.Mine',)\n")
    assert load_train_config(allowing, ["vae.type=own_vae.Mine"]).vae["type"] == "own_vae.Mine"
    assert "['own_vae.Mine']" in refused(allowing, ["vae.type=own_vae.Min"])

    substring = write(base, "_base_ = ['base.py']\nallow_types = 'own_vae.Mine'\n")
    assert "on the command line" in refused(substring, ["vae.type=own_vae.Mine"])


@pytest.mark.parametrize("text", ["x = " + "-" * 1_000_000 + "1", "x = " + "[" * 1_000_000, "\0"])
def test_a_config_that_python_cannot_parse_is_a_sentence(base: Path, text: str) -> None:
    assert "which cannot be loaded" in refused(write(base, text))
