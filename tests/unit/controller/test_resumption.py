# SPDX-License-Identifier: Apache-2.0
"""Test what a resume requires: an intact checkpoint, complete rows of metrics, the run's settings, data and reward."""

import json
import random
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from megarl.cli.export import find_adapter
from megarl.config import RunConfig, parse_config
from megarl.config.resume import CONTENTS, FREE, PLACES, check_changes, settings_of
from megarl.controller.recording.resumption import find_last, find_resumption
from megarl.errors import CheckpointError, ConfigError
from megarl.model.checkpoint.digests import seal, verify
from megarl.run_folder import evaluations, last_checkpoint
from tests.helpers.models import make_model

CONTENT = {"data": "7 prompts", "tokens": "t", "reward": "r", "adapter": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama", tied=True)


def settings(model, **changes) -> RunConfig:
    tree = {
        "model": {"path": str(model)},
        "task": {"name": "arithmetic"},
        "sampler": {"max_prompt_tokens": 32, "max_response_tokens": 32},
        "train": {"learning_rate": 1e-4},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        tree.setdefault(section, {})[key] = value
    return parse_config(tree)


def write_checkpoint(folder, step, config):
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    (checkpoint / "adapter").mkdir(parents=True)
    values = np.random.default_rng(step).random((40, 5), dtype=np.float32)
    save_file({"main.a": values, "exp_avg.a": values * 2}, checkpoint / "optimizer.safetensors")
    (checkpoint / "adapter" / "adapter_config.json").write_text("{}")
    run = {"settings": settings_of(config), "contents": CONTENT}
    extra = {"step": step, "updates": step, "stream": {"epoch": 0}, "run": run}
    (checkpoint / "state.json").write_text(seal(checkpoint, {"format": 3, "extra": extra}))
    return checkpoint


@pytest.fixture
def run(tmp_path, model):
    """Return a run folder with checkpoints of steps 2, 4 and 6, and rows of 7 steps."""
    folder = tmp_path / "run"
    for step in (2, 4, 6):
        write_checkpoint(folder, step, settings(model))
    rows = [json.dumps({"step": step, "reward": step / 10}) for step in range(1, 8)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "rollouts").mkdir()
    for step in range(1, 8):
        (folder / "rollouts" / f"step-{step:06d}.jsonl").write_text("")
    for step in (0, 4, 7):
        (folder / "evaluations" / f"step-{step:06d}").mkdir(parents=True)
        (folder / "evaluations" / f"step-{step:06d}" / "results.json").write_text("{}")
    return folder


def tree_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_session_goes_back_to_its_last_checkpoint_or_to_the_beginning(run, model):
    chosen = settings(model, train__resume=str(run), train__resume_step=2)  # what it began with no longer counts
    assert find_last(run, chosen, CONTENT).step == 6
    shutil.rmtree(run / "checkpoints")
    found = find_last(run, settings(model), CONTENT)
    assert (found.step, found.rows, len(found.later)) == (0, [], 7)
    found.apply()
    assert (run / "metrics.jsonl").read_text() == "" and not list((run / "rollouts").glob("step-*"))
    assert len((run / "metrics.discarded.jsonl").read_text().splitlines()) == 7
    assert list(evaluations(run)) == [0]


def test_what_came_after_the_checkpoint_is_put_aside_and_nothing_is_lost(run, model):
    before = tree_of(run)
    resumption = find_resumption(run, settings(model), CONTENT)
    assert (resumption.step, resumption.checkpoint.name) == (6, "step-000006")
    assert resumption.notes == ["metrics of 1 later steps are moved to metrics.discarded.jsonl"]
    assert tree_of(run) == before, "looking writes"
    back = find_resumption(run, settings(model, train__resume_step=4), CONTENT)
    back.apply()
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    moved = [json.loads(line)["step"] for line in (run / "metrics.discarded.jsonl").read_text().splitlines()]
    assert moved == [5, 6, 7]
    assert last_checkpoint(run).name == "step-000004"
    assert (run / "checkpoints" / "discarded-step-000006" / "state.json").is_file()
    assert list(evaluations(run)) == [0, 4] and (run / "evaluations" / "discarded-step-000007").is_dir()
    assert len(list((run / "rollouts").glob("step-*"))) == 4
    assert len(list((run / "rollouts").glob("discarded-*"))) == 3


def test_a_complete_run_that_goes_on_is_not_complete_any_more(run, model):
    for again in range(2):
        (run / "adapter").mkdir()
        (run / "adapter" / "adapter_config.json").write_text(str(again))
        (run / "summary.json").write_text(str(again))
        assert find_adapter(run) == run / "adapter"
        find_resumption(run, settings(model), CONTENT).apply()
        assert find_adapter(run) == run / "checkpoints" / "step-000006" / "adapter"
        assert not (run / "summary.json").exists() and (run / "discarded-summary.json").read_text() == str(again)
        assert (run / "discarded-adapter" / "adapter_config.json").read_text() == str(again)


def test_only_a_complete_checkpoint_is_resumed_from(run, model):
    (run / "checkpoints" / "step-000009").mkdir()
    assert find_resumption(run, settings(model), CONTENT).step == 6
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        find_resumption(run, settings(model), CONTENT)


def test_half_a_line_at_the_end_is_left_out(run, model):
    file = run / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'{"step": 8, "rew')
    resumption = find_resumption(run, settings(model), CONTENT)
    assert "half a line" in " ".join(resumption.notes)
    resumption.apply()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:2], lines[2][:9], *lines[3:]], "line 3 is not a row of metrics"),
        (lambda lines: [*lines[:2], *lines[3:]], "line 3 is of step 4, expected is 3"),
        (lambda lines: [*lines[:3], *lines[2:]], "line 4 is of step 3, expected is 4"),
        (lambda lines: lines[:4], "ends at step 4, before the checkpoint's step 6"),
        (lambda lines: [*lines[:1], '{"step": "2"}', *lines[2:]], "line 2 .*no integer 'step'"),
        (lambda lines: [*lines[:1], '{"step": 2, "reward": null}', *lines[2:]], "line 2 .*'reward' is None"),
        (lambda lines: [*lines[:1], "", *lines[1:]], "line 2 is empty"),
    ],
)
def test_damaged_metrics_are_refused_by_line(run, model, change, message):
    file = run / "metrics.jsonl"
    file.write_text("\n".join(change(file.read_text().splitlines())) + "\n")
    with pytest.raises(CheckpointError, match=rf"metrics\.jsonl'.* {message}.*; mend it, or move the file away"):
        find_resumption(run, settings(model), CONTENT)
    file.unlink()
    resumption = find_resumption(run, settings(model), CONTENT)
    assert "is gone" in resumption.notes[0]
    resumption.apply()
    assert "no rows" in find_resumption(run, settings(model), CONTENT).notes[0]


def test_every_flipped_bit_is_found_and_the_file_and_tensor_named(run):
    draw = random.Random(0)
    checkpoint = run / "checkpoints" / "step-000006"
    intact = tree_of(checkpoint)
    assert verify(checkpoint)["extra"]["step"] == 6
    tensors = 0
    for name, data in intact.items():
        for _ in range(25):
            changed = bytearray(data)
            place = draw.randrange(len(data))
            changed[place] ^= 1 << draw.randrange(8)
            (checkpoint / name).write_bytes(changed)
            with pytest.raises(CheckpointError, match=name) as caught:
                verify(checkpoint)
            tensors += "tensor 'main.a'" in str(caught.value) or "tensor 'exp_avg.a'" in str(caught.value)
        (checkpoint / name).write_bytes(data)
    assert tensors > 15
    for name in intact:
        (checkpoint / name).unlink()
        with pytest.raises(CheckpointError, match=name):
            verify(checkpoint)
        (checkpoint / name).write_bytes(intact[name])
    verify(checkpoint)


def test_a_damaged_newest_checkpoint_names_the_intact_one_before_it(run, model):
    for step in (4, 6):
        file = run / "checkpoints" / f"step-{step:06d}" / "optimizer.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match=r"tensor 'main.a' .*one before it is 'step-000002'.*resume_step=2"):
        find_resumption(run, settings(model), CONTENT)
    assert find_resumption(run, settings(model, train__resume_step=2), CONTENT).step == 2
    with pytest.raises(CheckpointError, match=r"resume_step is 3, but .* has complete checkpoints of steps: 2, 4, 6"):
        find_resumption(run, settings(model, train__resume_step=3), CONTENT)
    shutil.rmtree(run / "checkpoints" / "step-000002")
    with pytest.raises(CheckpointError, match="no checkpoint before it is intact"):
        find_resumption(run, settings(model), CONTENT)


def test_a_checkpoint_under_another_ones_name_is_refused(run, model):
    (run / "checkpoints" / "step-000006").rename(run / "checkpoints" / "step-000008")
    with pytest.raises(CheckpointError, match="step-000008' is damaged: it holds step 6"):
        find_resumption(run, settings(model), CONTENT)


def changes_of(model, contents=CONTENT, **changes):
    saved = {"settings": json.loads(json.dumps(settings_of(settings(model)))), "contents": CONTENT}
    return check_changes(saved, contents, settings(model, **changes))


def test_settings_that_decide_what_is_learned_are_refused_unless_asked(model):
    assert changes_of(model, train__steps=900, parallel__data=2, train__keep_rollouts=3) == set()
    with pytest.raises(ConfigError, match=r"train.learning_rate is 0.1, and was 0.0001.*resume_changes=\[train.learn"):
        changes_of(model, train__learning_rate=0.1)
    with pytest.raises(ConfigError, match=r"task.options is \{'max': 3\}, and was \{\}"):
        changes_of(model, task__options={"max": 3})
    asked = changes_of(model, task__options={"max": 3}, train__resume_changes=["task.options"])
    assert asked == {"task.options"}
    for name, value in (("lora__r", 8), ("train__seed", 7), ("model__dtype", "float32")):
        fixed = name.replace("__", ".")
        with pytest.raises(ConfigError, match=rf"{fixed} is .*: a run cannot go on with that"):
            changes_of(model, **{name: value}, train__resume_changes=[fixed])


@pytest.mark.parametrize("key", CONTENTS)
def test_what_lies_behind_a_path_may_not_change_unsaid(model, key):
    name, description = CONTENTS[key]
    with pytest.raises(ConfigError) as caught:
        changes_of(model, contents=CONTENT | {key: "other"})
    assert f"{name} is" in str(caught.value) and description in str(caught.value)
    if name != "lora.init_from":
        assert changes_of(model, contents=CONTENT | {key: "other"}, train__resume_changes=[name]) == {name}


# A new setting belongs here or in FREE, depending on whether another value makes it another experiment.
DECIDE = """
    task.name task.system_prompt task.options task.reward_weights task.held_out task.long_prompts
    task.chat_template_kwargs task.max_turns task.max_turn_tokens task.reward_errors
    loss.name loss.clip_low loss.clip_high loss.kl_coef loss.reference loss.aggregation loss.advantage_scale
    loss.importance_cap loss.options loss.truncated loss.overlong_tokens loss.overlong_penalty loss.importance_level
    loss.advantage loss.groups_without_signal
    loss.importance_mode model.family
    sampler.samples_per_prompt sampler.temperature sampler.top_p sampler.top_k sampler.engine_args
    sampler.max_prompt_tokens sampler.max_response_tokens sampler.stop sampler.seed
    train.prompts_per_step train.max_resample_factor train.max_staleness train.stale_groups train.updates_per_step
    train.learning_rate train.schedule train.warmup_steps train.weight_decay train.adam_beta1 train.adam_beta2
    train.adam_eps train.max_grad_norm
    eval.tasks
"""
NEVER = """
    model.dtype train.seed
    lora.r lora.lora_alpha lora.lora_dropout lora.target_modules lora.target_parameters lora.use_rslora
    lora.rank_pattern lora.alpha_pattern
"""


def test_every_setting_is_known_to_decide_or_not(model):
    """By its effect: each of them differs, and nothing else does."""
    saved, refused = settings_of(settings(model)), {"DECIDE": set(), "NEVER": set()}
    for name in saved.keys() - set(PLACES):
        try:
            check_changes({"settings": saved | {name: "another"}, "contents": CONTENT}, CONTENT, settings(model))
        except ConfigError as error:
            refused["NEVER" if "cannot go on with that" in str(error) else "DECIDE"].add(name)
    assert refused == {"DECIDE": set(DECIDE.split()), "NEVER": set(NEVER.split())}


def test_the_lists_name_settings_that_exist(model):
    names = settings_of(settings(model)).keys()
    for pattern in (*FREE, *PLACES):
        part = pattern.strip("*")
        assert any(part in name for name in names) or pattern == "*_seconds", pattern
