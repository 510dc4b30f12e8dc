"""The options of every command: name, type, default and help, each said once.

Command line, ``[tool.needlepoint]``, the pytest plugin and the Python face read their values with
these models. Nothing here needs torch: ``needlepoint COMMAND --help`` loads this module alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
)
from pydantic.fields import FieldInfo

from needlepoint.optimized.protocol.stages import StageKey
from needlepoint.verify.base.stages import RATIOS, declared_stages, stage_order
from needlepoint.verify.schema.base import Contract

Source = Literal["command line", "table", "python"]
"""Where values come from: texts of a command line, of a TOML table, or Python objects."""

DEFAULT_CANDIDATES: Final = (
    "emulated:fused-bf16",
    "emulated:fused-fp8",
    "emulated:fused-fp4",
    "emulated:unfused-bf16",
)
REPEAT_GATE: Final = "repeat.changed<=0"
"""What ``--repeat`` sets: no stage may change from run to run."""
DEVICES: Final = ("cpu", "cuda")
CONTRACTS: Final[tuple[Contract, ...]] = get_args(Contract)
MAX_LAYER: Final = 9999
MODELS: Final = "mini|v4-flash|v4-pro|v3.2|glm-5.2|CONFIG.json"
LIMITS: Final = "TOML: scale = X, or [stage] with value = Y."
_LAYERS = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")


def _number(least: int) -> BeforeValidator:
    def read(value: object, info: ValidationInfo) -> int:
        if info.context == "command line" and isinstance(value, str):
            value = int(value) if re.fullmatch(r"[0-9]{1,18}", value) else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"expected a whole number of at least {least}")
        return value

    return BeforeValidator(read)


def _text(value: object) -> str:
    if isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str):
        return os.fspath(value)
    raise ValueError("expected a name or a path")


def _path(value: object) -> Path:
    if isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str):
        return Path(value)
    raise ValueError("expected a path")


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("expected true or false")


def _several(value: object, info: ValidationInfo) -> object:
    """Return texts; Python may give a single one."""
    python = info.context == "python"
    if python and isinstance(value, str):
        return (value,)
    if python and isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError("expected a list of texts")
    if python and not all(isinstance(item, str) for item in value):
        raise ValueError("expected a text, or texts")
    return tuple(value)


def _counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, str):
        raise ValueError("expected whole numbers with commas between")
    parts = value.replace(" ", "").split(",")
    for part in parts:
        if re.fullmatch(r"[0-9]{1,18}", part) is None:
            raise ValueError(f"{part!r}: expected a whole number of at least 0")
    return tuple(dict.fromkeys(map(int, parts)))


def _contract(value: object) -> object:
    if value in CONTRACTS:
        return value
    raise ValueError(f"expected one of {', '.join(CONTRACTS)}")


def _cases(value: object) -> object:
    if value in ("stores", "scores"):
        return value
    raise ValueError("expected stores or scores")


def _device(value: object) -> object:
    if value in DEVICES:
        return value
    raise ValueError(f"expected {' or '.join(DEVICES)}")


def parse_layers(value: object) -> tuple[int, ...]:
    """Return the layers of ``2,4-8``, of one number or of several, in ascending order."""
    if not isinstance(value, str):
        items = tuple(value) if isinstance(value, Sequence | set | frozenset) else (value,)
        if not items or not all(isinstance(i, int) and not isinstance(i, bool) for i in items):
            raise ValueError("expected a number, numbers, or text such as '2,4-8'")
        value = ",".join(map(str, items))
    compact = value.replace(" ", "")
    if _LAYERS.fullmatch(compact) is None:
        raise ValueError(f"expected numbers up to {MAX_LAYER} and ranges, for example 2,4-8")
    layers: set[int] = set()
    for part in compact.split(","):
        first, _, last = part.partition("-")
        start, stop = int(first), int(last or first)
        if stop < start:
            raise ValueError(f"{part} runs backwards; write {last}-{first}")
        layers.update(range(start, stop + 1))
    return tuple(sorted(layers))


def parse_stages(value: object) -> frozenset[StageKey]:
    """Return the stages of ``pooled,index.stored``; a bare name stands for every path with it."""
    if isinstance(value, str):
        names = [part.strip() for part in value.split(",")]
    else:
        items = value if isinstance(value, Sequence | set | frozenset) else ()
        texts = [".".join(i) if isinstance(i, tuple) else i for i in items if _is_stage(i)]
        if not texts or len(texts) < len(items):
            raise ValueError("expected a name such as 'index.stored', or names")
        names = [part.strip() for text in texts for part in text.split(",")]
    known = sorted({key for ratio in RATIOS for key in declared_stages(ratio)}, key=stage_order)
    chosen: set[StageKey] = set()
    for name in names:
        found = {key for key in known if name in (key[1], ".".join(key))}
        if not found:
            raise ValueError(
                f"{name!r} is not a stage; expected names such as stored or index.stored from "
                f"{', '.join('.'.join(key) for key in known)}"
            )
        chosen |= found
    return frozenset(chosen)


def _is_stage(item: object) -> bool:
    """Return whether an item may stand for a stage: a name, or path and name."""
    parts = item if isinstance(item, tuple) else (item,)
    return bool(parts) and all(isinstance(part, str) for part in parts)


def _candidates(value: object, info: ValidationInfo) -> object:
    names = _several(value, info)
    assert isinstance(names, tuple)  # noqa: S101
    for name in names:
        if isinstance(name, str) and not name.strip():
            raise ValueError("expected a name such as emulated:fused-fp8")
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice; name every candidate once")
    return names


Text = Annotated[str, BeforeValidator(_text)]
MaybeText = Annotated[str | None, BeforeValidator(_text)]
File = Annotated[Path | None, BeforeValidator(_path)]
Place = Annotated[Path, BeforeValidator(_path)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_several)]
Candidates = Annotated[tuple[str, ...], BeforeValidator(_candidates)]
Layers = Annotated[tuple[int, ...] | None, BeforeValidator(parse_layers)]
Stages = Annotated[frozenset[StageKey] | None, BeforeValidator(parse_stages)]
FromZero = Annotated[int | None, _number(0)]
FromOne = Annotated[int | None, _number(1)]
Whole = Annotated[int, _number(0)]
Count = Annotated[int, _number(1)]
Counts = Annotated[tuple[int, ...] | None, BeforeValidator(_counts)]
ContractName = Annotated[Contract, BeforeValidator(_contract)]
Cases = Annotated[Literal["stores", "scores"] | None, BeforeValidator(_cases)]
Device = Annotated[Literal["cpu", "cuda"], BeforeValidator(_device)]


def is_place(field: FieldInfo) -> bool:
    """Return whether a text of this option may be a path."""
    readers = [one.func for one in field.metadata if isinstance(one, BeforeValidator)]
    return _text in readers or _path in readers


def option(default: Any, metavar: str, told: str, *, alias: str | None = None) -> Any:  # noqa: ANN401
    """Return a field: its default, how its value is spelled in help, and the help."""
    return Field(
        default=default, alias=alias, description=told, json_schema_extra={"metavar": metavar}
    )


def flag(told: str) -> Any:  # noqa: ANN401
    """Return the field of an option without a value."""
    return option(False, "", told)


def argument(metavar: str, told: str) -> Any:  # noqa: ANN401
    """Return the field of a value that stands without an option before it."""
    extra: dict[str, Any] = {"metavar": metavar, "argument": True}
    return Field(description=told, json_schema_extra=extra)


LAST: Final = (
    *("svg", "gate", "json_", "junitxml", "html", "markdown", "root", "force", "quiet", "debug"),
)
"""Fields that help lists last: what is written and said."""
_WRITES: Final = frozenset({*LAST, "shrink", "save_failures"}) - {"gate"}


class Options(BaseModel):
    """Options of a command. The docstring of each model is the command's help."""

    # Built at the first use: a command needs one of these models.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        defer_build=True,
        populate_by_name=True,
        protected_namespaces=(),
    )
    own_defaults: ClassVar[frozenset[str] | None] = None
    """Options whose default no ``[tool.needlepoint]`` changes; None for all of them."""
    _asked: frozenset[str] = PrivateAttr(default=frozenset())

    @classmethod
    def read(
        cls,
        values: Mapping[str, object],
        source: Source,
        shown: Callable[[str, object], str],
        table: Mapping[str, object] | None = None,
    ) -> Self:
        """Return the options of values by name, spelled as on the command line.

        ``shown(name, value)`` begins the message of an error. ``table`` holds defaults from a file,
        already checked.

        Raises
        ------
        ValueError
            For a value that an option does not take.
        """
        merged = {**cls.taken(table or {}), **values}
        try:
            options = cls.model_validate(merged, context=source)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            cause = first.get("ctx", {}).get("error", first["msg"])
            raise ValueError(
                f"{shown('.'.join(map(str, first['loc'])), first['input'])}: {cause}"
            ) from error
        options._asked = frozenset(values)
        return options

    @classmethod
    def taken(cls, table: Mapping[str, object]) -> dict[str, object]:
        """Return the values of a table of defaults that are defaults of this command."""
        if cls.own_defaults is None:
            return {}
        names = set(cls.options()) - cls.own_defaults
        return {name: value for name, value in table.items() if name in names}

    def asked(self, name: str) -> bool:
        """Return whether the caller gave this option, not a table of defaults."""
        return name in self._asked

    def words(self) -> list[str]:
        """Return the options that were set as a command line spells them, outputs left out."""
        words: list[str] = []
        for name, field in self.options().items():
            attribute = name.replace("-", "_")
            if attribute not in self.model_fields_set or attribute in _WRITES:
                continue
            value = getattr(self, attribute)
            if isinstance(value, bool):
                words += [f"--{name}"] * value
            elif field.annotation == tuple[str, ...]:
                words += [word for text in value for word in (f"--{name}", text)]
            elif isinstance(value, frozenset):
                stages = sorted(value, key=stage_order)
                words += [f"--{name}", ",".join(".".join(key) for key in stages)]
            elif isinstance(value, tuple):
                words += [f"--{name}", ",".join(map(str, value))]
            else:
                words += [f"--{name}", str(value)]
        return words

    @classmethod
    def options(cls) -> dict[str, FieldInfo]:
        """Return the fields by option: what to run over first, what is written and said last."""
        names = [n for n in cls.model_fields if n not in LAST]
        names += [n for n in LAST if n in cls.model_fields]
        fields = [(name, cls.model_fields[name]) for name in names]
        return {field.alias or name: field for name, field in fields}


def on_device(names: Sequence[str], device: str) -> tuple[str, ...]:
    """Return built-in candidates on a device: those of a card have the names of the emulated."""
    prefix = "emulated:" if device == "cpu" else "cuda:"
    return tuple(name.replace("emulated:", prefix) for name in names)


class Manners(Options):
    """How a command behaves whatever it does."""

    force: Flag = flag("Overwrite output files.")
    quiet: Flag = flag("Print the verdict line only.")
    debug: Flag = flag("Print a traceback with an error.")


class Written(Manners):
    """What becomes of a result."""

    gate: Texts = option((), "PATH<=VALUE", "Repeatable; a figure of each candidate's result.")
    json_: File = option(None, "FILE", "Write the result, row errors beside it.", alias="json")
    junitxml: File = option(None, "FILE", "Write JUnit XML.")
    html: File = option(None, "FILE", "Write a report to open in a browser.")
    markdown: File = option(None, "FILE", "Write a summary for a pull request.")

    def gates(self) -> tuple[str, ...]:
        """Return every gate that the result is held to."""
        return self.gate


class InputOptions(Options):
    """What a command runs over."""

    input: Text = option("mini", "mini|synthetic[:KIND]|PATH", "What to run over.")
    model: MaybeText = option(None, MODELS, "Model shapes; default: the input's.")
    checkpoint: File = option(None, "DIR", "Weights; default: drawn from the seed.")
    contract: ContractName = option("bf16", "exact|bf16|official", "What cost is counted against.")
    layers: Layers = option(None, "2,4-8", "Default: those recorded; else the first of each ratio.")
    tokens: FromOne = option(None, "N", "Default: all of a recording, 2,304 of a synthetic input.")
    seed: FromZero = option(None, "N", "Seed of weights and synthetic input.")
    device: Device = option(
        "cpu",
        "cpu|cuda",
        "Where verify runs the reference, and which built-in candidates run unless named.",
    )


class VerifyOptions(Written, InputOptions):
    """Run reference and candidates over an input and judge every stage of every layer."""

    own_defaults = frozenset()
    candidate: Candidates = option((), "NAME", "Repeatable; default: the four emulated candidates.")
    stages: Stages = option(
        None, "pooled,index.stored", "Stages to compare; default: all declared."
    )
    scenario: MaybeText = option(
        None, "FILE|all", "Drive candidates through request histories instead."
    )
    seconds: FromOne = option(None, "N", "Time of --scenario all; default 60.")
    repeat: Count = option(1, "N", "Run every candidate N times; each run must be the same.")
    swap: Flag = flag("Replace one stage at a time by the reference, and the reverse.")
    shrink: File = option(None, "DIR", "Write the smallest input that still differs.")
    save_failures: File = option(
        None, "DIR", "Record every candidate that differs.", alias="save-failures"
    )
    limits: File = option(None, "FILE", LIMITS)

    def gates(self) -> tuple[str, ...]:
        """Return every gate that the result is held to."""
        return (*self.gate, REPEAT_GATE) if self.repeat > 1 else self.gate

    def candidates(self) -> tuple[str, ...]:
        """Return the names of the candidates; without any the four built-in ones of the device."""
        return self.candidate or on_device(DEFAULT_CANDIDATES, self.device)


class RecordOptions(Manners, InputOptions):
    """Write the stages of the reference or of one candidate to a folder."""

    own_defaults = frozenset({"candidate"})
    out: Place = option(..., "DIR", "Folder to write; must not exist.")
    candidate: Candidates = option((), "NAME", "Default: the reference.")

    def recorded(self) -> str | None:
        """Return the candidate to record, None for the reference.

        Raises
        ------
        ValueError
            For more than one candidate, a candidate with a contract (its arithmetic is its own), or
            another device without a candidate.
        """
        if not self.candidate and self.device != "cpu":
            raise ValueError(
                f"--device {self.device} without --candidate: the reference runs on the CPU; name "
                "a candidate such as cuda:fused-bf16"
            )
        if len(self.candidate) > 1:
            raise ValueError(
                f"--candidate {', '.join(self.candidate)}: a recording holds one candidate; record "
                "each to a folder of its own"
            )
        if self.candidate and self.asked("contract"):
            raise ValueError(
                f"--contract with --candidate {self.candidate[0]}: a contract is the arithmetic of "
                "the reference; leave one of the two away"
            )
        return next(iter(self.candidate), None)


class DiffOptions(Written):
    """Judge recording B against recording A."""

    own_defaults = frozenset()
    a: Place = argument("A", "Recording to judge against.")
    b: Place = argument("B", "Recording to judge.")
    contract: ContractName = option("bf16", "exact|bf16|official", "What cost is counted against.")
    layers: Layers = option(None, "2,4-8", "Default: all layers of both.")
    stages: Stages = option(
        None, "pooled,index.stored", "Stages to compare; default: all declared."
    )
    limits: File = option(None, "FILE", LIMITS)


class RejudgeOptions(Written):
    """Judge a saved result by other limits; nothing is rerun."""

    result: Place = argument("RESULT", "File of --json, row errors beside it.")
    limits: File = option(None, "FILE", LIMITS)


class SelftestOptions(Manners):
    """Plant faults and print which gate catches which; 0 if all are caught and no control is."""

    own_defaults = frozenset({"input", "model", "tokens", "json"})
    input: MaybeText = option(
        None, "mini|synthetic[:KIND]|PATH", "What to plant on; default: a small input of its own."
    )
    model: MaybeText = option(None, MODELS, "Model of --input.")
    tokens: FromOne = option(None, "N", "Tokens of --input; default: at most 1200.")
    seed: Whole = option(0, "N", "Seed of the rows planted on.")
    limits: File = option(None, "FILE", LIMITS)
    json_: File = option(None, "FILE", "Write needlepoint.selftest/1.", alias="json")


class RecallOptions(Written):
    """Measure which needles each candidate picks, beside the reference, and why it misses any."""

    own_defaults = frozenset({"input", "layers", "model", "checkpoint"})
    input: MaybeText = option(None, "PATH", "Recording with needles; default: the grid.")
    model: MaybeText = option(None, "NAME", "Model shapes of --input.")
    checkpoint: File = option(None, "DIR", "Weights for --input.")
    lengths: Text = option("2560,4509,10498,22528", "N,N@POSITION", "Tokens of the prompts.")
    depths: Text = option("0,25,50,75,100", "PERCENT,..", "Where needles stand.")
    haystacks: FromOne = option(None, "N", "Prompts a length; default: 20, of a server 3.")
    needles: Count = option(2, "N", "Needles a depth and prompt.")
    distractors: Counts = option(None, "N,..", "Near-duplicates a prompt.")
    passages: File = option(None, "DIR", "Pool of make_recall; default: the shipped.")
    memory: Text = option("8GiB", "8GiB", "Memory to fill with index keys.")
    contract: ContractName = option("bf16", "exact|bf16|official", "The reference of the pairs.")
    candidate: Candidates = option((), "NAME", "Repeatable; default: the three fused emulations.")
    layers: Layers = option(None, "0,1", "Layers; default: 0.")
    seed: FromZero = option(None, "N", "Seed of prompts and pages.")
    device: Device = option("cpu", "cpu|cuda", "Which candidates run where none is named.")
    limits: File = option(None, "FILE", "TOML: limits for causes.")
    svg: File = option(None, "FILE", "Write heat maps and curves.")
    server: Texts = option((), "URL", "Ask an OpenAI-compatible endpoint; repeat to compare.")
    api_model: Texts = option(
        (), "NAME", "Its model; default: the first listed.", alias="api-model"
    )
    body: Texts = option((), "JSON", "Fields added to requests; repeat to compare two.")
    questions: Text = option(
        "content,position,quote", "KIND,..", "Ask by content, position, quote."
    )
    cache: Text = option("cold", "cold,warm", "Prefix cache.")
    concurrency: Text = option("1", "1,8", "Questions at a time.")
    starts: Count = option(1, "N", "Server starts.")
    restart: MaybeText = option(None, "COMMAND", "Starts the servers anew between starts.")
    picks: MaybeText = option(None, "LAYERSxK", "Read picks that the endpoint returns.")
    timeout: Count = option(120, "S", "Seconds a request.")
    pause_ms: Whole = option(200, "MS", "Between two requests.", alias="pause-ms")
    token_budget: Count = option(
        2_000_000, "N", "Estimated prompt tokens to send.", alias="token-budget"
    )
    resume: File = option(None, "FILE", "Journal of replies to go on from.")
    gate: Texts = option((), "PATH<=VALUE", "Such as recall.lost<=0.")
    json_: File = option(None, "FILE", "Write the result.", alias="json")
    quiet: Flag = flag("Print the first line only.")

    def candidates(self) -> tuple[str, ...]:
        """Return the names of the candidates; without any the fused built-in ones of the device."""
        fused = tuple(name for name in DEFAULT_CANDIDATES if "unfused" not in name)
        return self.candidate or on_device(fused, self.device)


class BenchOptions(Manners):
    """Measure the CUDA kernels beside SGLang's and beside the bytes that must move."""

    device: Text = option("cuda", "cuda", "What to measure.")
    sglang: File = option(None, "DIR", "SGLang's package folder; default: the installed one.")
    only: Texts = option((), "TEXT", "Repeatable; a part of a workload's name.")
    scores: Flag = flag("Measure index scores and top-k instead of stores.")
    json_: File = option(None, "FILE", "Write needlepoint.bench/1.", alias="json")
    quiet: Flag = flag("Print no line before the table.")


class DoctorOptions(Manners):
    """Say what this machine can run, and why not the rest; 0 if it could be told."""

    caches: Flag = flag("List every built kernel.")
    purge_stale: Flag = option(
        False, "", "Remove built kernels that are stale.", alias="purge-stale"
    )
    json_: File = option(None, "FILE", "Write needlepoint.doctor/1.", alias="json")
    quiet: Flag = flag("Print nothing.")


class ListOptions(Options):
    """List every fixture: kind, tensors, and why it is what it is."""

    root: File = option(None, "DIR", "Root of the checkout; default: the one around this folder.")
    debug: Flag = flag("Print a traceback with an error.")


class CheckOptions(ListOptions):
    """Check every byte under fixtures/; 1 on any fault."""


class ProposeOptions(ListOptions):
    """Write a new golden beside the old one and print what changes."""

    name: Text = argument("NAME", "Folder under fixtures/.")
    source: File = option(None, "DIR", "Recording, or a folder that a script made.", alias="from")
    result: File = option(None, "RESULT", "Result that vouches for a recording.")
    generator: MaybeText = option(None, "SCRIPT", "What made the folder of --from.")
    input: MaybeText = option(None, "mini|synthetic[:KIND]", "Input of a reference.")
    model: MaybeText = option(None, "NAME", "Model shapes.")
    layers: Layers = option(None, "2,4-8", "Layers.")
    tokens: FromOne = option(None, "N", "Tokens.")
    seed: FromZero = option(None, "N", "Seed.")
    contract: ContractName = option("bf16", "exact|bf16|official", "Arithmetic of the reference.")
    keep: Stages = option(None, "index.stored,..", "Stages to keep.")
    emulation: MaybeText = option(None, "NAME", "What a recording is compared with.")
    cases: Cases = option(None, "stores|scores", "Record every kernel of this card over cases.")


class AcceptOptions(ListOptions):
    """Put proposals in place; refused in CI, without a reason, and beside other changes."""

    names: Texts = argument("NAME..", "Folders under fixtures/.")
    reason: Text = option("", "TEXT", "Why; kept in the history.")
    remove: Flag = flag("Remove the fixtures.")
