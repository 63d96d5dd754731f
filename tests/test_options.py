"""Configuration from types: precedence, sources, shorthands, and what is said about every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.engine.errors import UserError
from arriero.launchers.keys import documented, layout, nearest
from arriero.launchers.options import Arguments, resolve, resolve_command


@dataclass(frozen=True, kw_only=True)
class Source:
    """Prompts from a file."""

    path: str
    limit: PositiveInt | None = None  # at most so many
    shuffle: bool = False


@dataclass(frozen=True, kw_only=True)
class Contains:
    kind: Literal["contains"] = "contains"
    weight: PositiveFloat = 1.0
    ignore_case: bool = False


@dataclass(frozen=True, kw_only=True)
class Numeric:
    kind: Literal["numeric"] = "numeric"
    weight: PositiveFloat = 0.5
    tolerance: float


Reward = Annotated[Contains | Numeric, Field(discriminator="kind")]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: PositiveFloat = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)

    def __post_init__(self) -> None:
        if self.betas[0] > self.betas[1]:
            raise ValueError("the first beta is above the second")


@dataclass(frozen=True, kw_only=True)
class Trainer:
    optimizer: Optimizer = Optimizer(lr=3e-4)
    micro_batch: int = 8


@dataclass(frozen=True, kw_only=True)
class Config:
    data: Source
    reward: Reward = Contains(ignore_case=True)
    trainer: Trainer = Trainer()
    second: Reward | None = None
    extra: tuple[Reward, ...] = ()
    stop: tuple[str, ...] = ()
    chat: dict[str, Any] = Field(default_factory=dict)
    mode: Literal["fast", "slow"] = "fast"
    staleness: Annotated[int, Field(ge=0, description="versions a token may be old")] = 1


def words(*args: str) -> tuple[Config, dict[str, str]]:
    return resolve(Config, None, args)


def refusal(*args: str, toml: Path | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        resolve(Config, toml, args)
    return str(caught.value).splitlines()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    toml = write(tmp_path, 'staleness = 2\n[data]\npath = "a"\nlimit = 5\n[trainer.optimizer]\nlr = 0.5\n')
    config, sources = resolve(Config, toml, ["--data.limit", "7"])

    assert config.data == Source(path="a", limit=7)
    assert config.trainer.optimizer.lr == 0.5
    assert config.staleness == 2
    assert sources["data.limit"] == "command line"
    assert sources["data.path"] == sources["trainer.optimizer.lr"] == sources["staleness"] == str(toml)
    assert sources["data.shuffle"] == sources["trainer.micro_batch"] == sources["reward.kind"] == "default"


def test_one_key_of_a_section_leaves_the_rest_of_its_default_as_it_is() -> None:
    config, _ = words("--data", "x", "--trainer.optimizer.betas", "0.8,0.9", "--reward.weight=2")

    assert config.trainer.optimizer == Optimizer(lr=3e-4, betas=(0.8, 0.9))
    assert config.reward == Contains(ignore_case=True, weight=2.0)


@pytest.mark.parametrize(
    ("args", "want"),
    [
        (["--data", "x", "--data.shuffle"], Source(path="x", shuffle=True)),
        (["--data", "x", "--data.shuffle", "--mode", "slow"], Source(path="x", shuffle=True)),
        (["--data", "x", "--data.shuffle", "false"], Source(path="x")),
        (["--data.path=--x"], Source(path="--x")),
        (["--data.path", "x", "--data.limit", "none"], Source(path="x")),
        (["--data.path", "x", "--data.limit", "3", "--data.limit", "4"], Source(path="x", limit=4)),
        (["--data", '{"path": "x", "limit": 2}', "--data.limit", "3"], Source(path="x", limit=3)),
    ],
)
def test_a_section_is_set_by_its_keys_by_json_or_by_its_path(args: list[str], want: Source) -> None:
    assert words(*args)[0].data == want


def test_a_union_is_chosen_by_its_kind_and_takes_the_keys_of_that_kind() -> None:
    config, sources = words(
        "--data", "x", "--reward", "numeric", "--reward.tolerance", "1e-3", "--second=contains"
    )

    assert config.reward == Numeric(tolerance=1e-3)
    assert config.second == Contains()
    assert sources["reward.kind"] == sources["second.kind"] == "command line"
    assert words("--data", "x")[1]["second"] == "default"


def test_another_kind_on_the_command_line_leaves_out_what_the_file_said_for_the_first(tmp_path: Path) -> None:
    toml = write(tmp_path, 'data = "x"\n[reward]\nkind = "contains"\nignore-case = false\nweight = 3.0\n')

    assert resolve(Config, toml, [])[0].reward == Contains(weight=3.0)
    changed, _ = resolve(Config, toml, ["--reward", "numeric", "--reward.tolerance", "0"])
    assert changed.reward == Numeric(weight=3.0, tolerance=0.0)
    assert resolve(Config, toml, ["--reward", '{"kind": "numeric", "tolerance": 0}'])[0] == changed


def test_an_optional_section_can_be_taken_away_again(tmp_path: Path) -> None:
    toml = write(tmp_path, 'data = "x"\n[second]\nkind = "contains"\n')

    config, sources = resolve(Config, toml, ["--second", "none"])
    assert config.second is None
    assert sources["second"] == "command line"
    assert resolve(Config, toml, ["--second", "none", "--second", "contains"])[0].second == Contains()


@dataclass(frozen=True, kw_only=True)
class MaybeOptimized:
    optimizer: Optimizer | None = None


def test_one_key_of_an_optional_section_is_enough_for_it_to_be_there() -> None:
    assert resolve(MaybeOptimized, None, [])[0].optimizer is None
    assert resolve(MaybeOptimized, None, ["--optimizer.lr", "2e-3"])[0].optimizer == Optimizer(lr=2e-3)


def test_lists_are_separated_by_commas_repeated_or_json() -> None:
    for args in (
        ["--stop", "a,b"],
        ["--stop", "a", "--stop", "b"],
        ["--stop", '["a", "b"]'],
        ["--stop=a, b"],
    ):
        assert words("--data", "x", *args)[0].stop == ("a", "b")
    assert words("--data", "x", "--stop", "")[0].stop == ()


def test_a_list_of_sections_takes_kinds_or_tables(tmp_path: Path) -> None:
    toml = write(
        tmp_path, 'data = "x"\n[[extra]]\nkind = "numeric"\ntolerance = 1\n[[extra]]\nkind = "contains"\n'
    )

    assert resolve(Config, toml, [])[0].extra == (Numeric(tolerance=1.0), Contains())
    assert words("--data", "x", "--extra", "contains,contains")[0].extra == (Contains(), Contains())
    toml = write(tmp_path, 'data = "x"\n[[extra]]\nkind = "numeric"\ntolerence = 1\n')
    assert refusal(toml=toml) == [
        f"unknown key extra[0].tolerence ({toml}); did you mean extra[0].tolerance?",
        "missing: extra[0].tolerance; give --key value or put them into a --config file",
    ]


def test_dictionaries_are_json_and_tables() -> None:
    assert words("--data", "x", "--chat", '{"a": [1, null]}')[0].chat == {"a": [1, None]}
    [line] = refusal("--data", "x", "--chat", "{a}")
    assert line.startswith("chat = {a} (command line) is not JSON (")


def test_dashes_and_underscores_are_the_same() -> None:
    assert (
        words("--data", "x", "--trainer.micro-batch", "2")[0]
        == words("--data=x", "--trainer.micro_batch=2")[0]
    )


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.optimizer.lrr", "trainer.optimizer.lr"),
        ("lr", "trainer.optimizer.lr"),
        ("optimizer.lr", "trainer.optimizer.lr"),
        ("reward.tolerence", "reward.tolerance"),
        ("stalenes", "staleness"),
        ("ignore_case", "second.ignore_case"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key: str, meant: str) -> None:
    assert refusal("--data", "x", f"--{key}", "1") == [
        f"unknown key {key} (command line); did you mean {meant}?"
    ]


def test_an_unknown_key_of_a_file_is_refused_with_the_file(tmp_path: Path) -> None:
    toml = write(tmp_path, 'data = "x"\n[trainer.optim]\nlr = 1.0\n')
    [line] = refusal(toml=toml)
    assert line == f"unknown key trainer.optim ({toml}); did you mean trainer.optimizer.lr?"


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    toml = write(tmp_path, "[trainer.optimizer]\nlr = -1\n")
    lines = refusal("--mode", "quick", "--reward", "numeric", "--stalenes", "1", "loose", "--mode", toml=toml)

    assert lines == [
        "'loose' stands alone; write --key value",
        "--mode needs a value: --mode value, or --mode=--value if it starts with --",
        "unknown key stalenes (command line); did you mean staleness?",
        f"trainer.optimizer.lr = -1 ({toml}) should be greater than 0; it takes float > 0",
        "mode = quick (command line) should be 'fast' or 'slow'; it takes fast | slow",
        "missing: data.path, reward.tolerance; give --key value or put them into a --config file",
    ]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ["--trainer.micro_batch", "x"],
            "trainer.micro_batch = x (command line) should be a valid integer, unable to parse",
        ),
        (
            ["--trainer.optimizer.betas", "0.9,z"],
            "trainer.optimizer.betas = 0.9,z (command line) [1] should be a valid number, unable",
        ),
        (["--trainer.optimizer.betas", "1,0"], "trainer.optimizer: the first beta is above the second"),
        (
            ["--reward", "contain"],
            "reward.kind = contain (command line) should be contains | numeric; did you mean contains?",
        ),
        (
            ["--reward.tolerance", "1"],
            "reward.tolerance = 1 (command line) has no use: reward.kind is contains",
        ),
        (["--second.weight", "1"], "missing: second.kind (contains | numeric); "),
        (["--trainer", "x"], "trainer = x (command line) has keys of its own, such as trainer.optimizer"),
    ],
)
def test_a_wrong_value_is_told_in_one_line(args: list[str], line: str) -> None:
    [told] = refusal("--data", "x", *args)
    assert told.startswith(line)


def test_a_file_that_cannot_be_read_is_told_with_its_line(tmp_path: Path) -> None:
    assert refusal(toml=tmp_path / "no.toml")[0].endswith(
        "No such file or directory; --config takes a TOML file"
    )
    assert "line 2" in refusal(toml=write(tmp_path, "a = 1\nb = \n"))[0]


def test_options_of_the_command_are_told_apart_from_keys_of_the_pipeline(tmp_path: Path) -> None:
    toml = write(tmp_path, 'data = "x"\nseed = 1\n')
    options, config, _ = resolve_command(
        Config, Arguments, ["--data", "y", "--seed", "4", "--inline", "--staleness=0"]
    )
    assert (options.seed, options.inline, config.data.path, config.staleness) == (4, True, "y", 0)

    with pytest.raises(UserError) as caught:
        resolve_command(Config, Arguments, ["--config", str(toml), "--run-dri", "x", "--port=-3"])
    assert str(caught.value).splitlines() == [
        "port = -3 (command line) should be greater than or equal to 0; it takes int >= 0 <= 65535",
        f"seed ({toml}) is an option of the command: give it on the command line",
        "unknown key run_dri (command line); did you mean run_dir?",
    ]


def test_a_pipeline_key_with_the_name_of_an_option_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Clash:
        seed: int = 0

    with pytest.raises(UserError, match="Clash: seed is an option of the command; rename the field"):
        resolve_command(Clash, Arguments, [])


def test_a_key_is_described_by_type_default_and_what_its_source_says() -> None:
    keys = {k.name: k for k in layout(Config).keys}

    docs = {k.name: doc for k, doc in documented(layout(Config))}
    assert keys["data.limit"].takes == "int > 0 | none"
    assert docs["data.limit"] == "at most so many"
    assert docs["staleness"] == "versions a token may be old"
    assert keys["trainer.optimizer.lr"].default == 3e-4
    assert keys["reward.tolerance"].when == "reward.kind numeric"
    assert keys["stop"].takes == "tuple[str, ...]"


def test_nothing_is_suggested_for_what_resembles_nothing() -> None:
    assert nearest("zzz", ["data.path", "mode"]) == ""
    assert nearest("overlong.buffer", ["reward.buffer", "overlong_buffer"]) == "overlong_buffer"
    assert nearest("reward", ["rewards", "environment.reward.kind"]) == "environment.reward"


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("trainer.optimizer.lr", "inf"),
        ("trainer.optimizer.lr", "1e999"),
        ("trainer.optimizer.betas", "0.5,inf"),
        ("chat", '{"a": [NaN]}'),
    ],
)
def test_a_number_that_isnt_finite_is_refused_by_its_key(key: str, word: str) -> None:
    (line,) = refusal("--data", "x", f"--{key}", word)
    assert line.startswith(f"{key} = {word} (command line) isn't finite; give a number")


def test_options_of_the_command_are_finite_too() -> None:
    with pytest.raises(UserError, match=r"wait_bound_s = inf \(command line\) isn't finite"):
        resolve_command(Config, Arguments, ["--data", "x", "--wait-bound-s", "inf"])
