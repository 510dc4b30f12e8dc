"""The kernel cache: what is rebuilt, what is never loaded, what is refused."""

from __future__ import annotations

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from needlepoint.optimized.build import compile as building
from needlepoint.optimized.build import kernels
from needlepoint.optimized.build.arguments import (
    Arguments,
    StepArguments,
    StoreArguments,
    cpp_fields,
)
from needlepoint.optimized.build.cache import cached_modules
from needlepoint.optimized.build.compile import (
    build,
    headers,
    module_key,
    sources_sha256,
    translation_unit,
)
from needlepoint.optimized.build.kernels import KernelUse, module_uses, parse_log
from needlepoint.optimized.build.toolchain import CSRC, FLAGS, BuildError, Toolchain
from needlepoint.optimized.build.variants import (
    MODULES,
    VARIANTS,
    query_name,
    step_name,
    store_name,
)

MODULE = "query"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the CUDA sources, with a compiler that copies and counts its runs."""
    ninja = shutil.which("ninja")
    assert ninja is not None
    folder = tmp_path / "csrc"
    shutil.copytree(CSRC, folder)
    tools = Toolchain(Path("nvcc"), Path(ninja), tmp_path, tmp_path, tmp_path / "x.so", "stand-in")
    monkeypatch.setattr(building, "toolchain", lambda: tools)
    monkeypatch.setattr(building, "_ninja_file", stand_in(tmp_path / "runs"))
    monkeypatch.delenv(building.BUILD_VARIABLE, raising=False)
    return folder


def stand_in(runs: Path, command: str = "cp $in $out") -> object:
    def write(module: str, architecture: str, folder: Path) -> str:
        return (
            f"rule copy\n  command = echo {architecture} >> {runs} && {command}\n"
            f"build {module}.so: copy {module}.cu\n"
        )

    return write


def runs(tmp_path: Path) -> int:
    log = tmp_path / "runs"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_module_is_built_once(sources: Path, tmp_path: Path) -> None:
    first = build(MODULE, "90a", tmp_path / "cache", sources)
    second = build(MODULE, "90a", tmp_path / "cache", sources)

    assert (first.path_taken, second.path_taken, runs(tmp_path)) == ("built", "cached", 1)
    assert second.library.read_text() == translation_unit(MODULE)
    assert second.log == first.log


def test_builds_at_the_same_time_run_one_compiler(sources: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        built = list(
            pool.map(lambda _: build(MODULE, "90a", tmp_path / "cache", sources), range(6))
        )

    assert runs(tmp_path) == 1
    assert sorted(result.path_taken for result in built) == ["built", *["cached"] * 5]


@pytest.mark.parametrize("header", ["query/query.cuh", "common/arith.cuh", "launch/launch.h"])
def test_an_edited_header_rebuilds(sources: Path, tmp_path: Path, header: str) -> None:
    before = build(MODULE, "90a", tmp_path / "cache", sources)
    with (sources / header).open("a") as file:
        file.write("// edited\n")
    after = build(MODULE, "90a", tmp_path / "cache", sources)

    assert (after.path_taken, runs(tmp_path)) == ("built", 2)
    assert after.key != before.key


def test_a_file_that_is_not_included_does_not_rebuild(sources: Path, tmp_path: Path) -> None:
    build(MODULE, "90a", tmp_path / "cache", sources)
    (sources / "other.cuh").write_text("// new\n")

    assert build(MODULE, "90a", tmp_path / "cache", sources).path_taken == "cached"


def test_keys_differ_by_architecture_compiler_and_flags(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {module_key(MODULE, "90a", sources), module_key(MODULE, "120a", sources)}
    monkeypatch.setattr(building, "FLAGS", (*FLAGS, "-g"))
    keys.add(module_key(MODULE, "90a", sources))
    newer = Toolchain(sources, sources, sources, sources, sources, version="newer")
    monkeypatch.setattr(building, "toolchain", lambda: newer)
    keys.add(module_key(MODULE, "90a", sources))

    assert len(keys) == 4


@pytest.mark.parametrize("damage", ["library", "manifest", "absent"])
def test_a_damaged_build_is_never_loaded(sources: Path, tmp_path: Path, damage: str) -> None:
    built = build(MODULE, "90a", tmp_path / "cache", sources)
    if damage == "library":
        built.library.write_text("half")
    elif damage == "manifest":
        (built.library.parent / "manifest.json").write_text("{")
    else:
        built.library.unlink()
    again = build(MODULE, "90a", tmp_path / "cache", sources)

    assert (again.path_taken, runs(tmp_path)) == ("built", 2)
    assert again.library.read_text() == translation_unit(MODULE)


@pytest.mark.parametrize("path", ["manifest.json", f"{MODULE}.so"])
@pytest.mark.parametrize("kind", ["pipe", "endless", "nested", "folder"])
def test_files_that_no_build_leaves_are_damage(
    sources: Path, tmp_path: Path, path: str, kind: str
) -> None:
    built = build(MODULE, "90a", tmp_path / "cache", sources)
    target = built.library.parent / path
    target.unlink()
    if kind == "pipe":
        os.mkfifo(target)
    elif kind == "endless":
        target.symlink_to("/dev/zero")
    elif kind == "nested":
        target.write_text("[" * 100_000)
    else:
        target.mkdir()

    (listed,) = cached_modules(tmp_path / "cache", sources)
    assert listed.stale == "damaged: library and manifest do not agree"
    assert build(MODULE, "90a", tmp_path / "cache", sources).path_taken == "built"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_stands_in_the_place_of_a_module_is_replaced(
    sources: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(MODULE, "90a", tmp_path / "cache", sources).library.parent
    other = folder.rename(tmp_path / "other")
    if kind == "file":
        folder.write_text("a file")
    else:
        folder.symlink_to(other)
    monkeypatch.setenv(building.BUILD_VARIABLE, "force")

    assert build(MODULE, "90a", tmp_path / "cache", sources).path_taken == "built"
    assert folder.is_dir()
    assert not folder.is_symlink()
    assert (other / "manifest.json").is_file()


def test_a_lock_that_is_a_link_leads_nowhere(sources: Path, tmp_path: Path) -> None:
    cache, valuable = tmp_path / "cache", tmp_path / "valuable"
    valuable.write_text("precious")
    cache.mkdir()
    key = module_key(MODULE, "90a", sources)
    (cache / f"{MODULE}-sm_90a-{key}.lock").symlink_to(valuable)

    with pytest.raises(BuildError, match=r"kernel cache .* set NEEDLEPOINT_KERNEL_CACHE"):
        build(MODULE, "90a", cache, sources)
    assert valuable.read_text() == "precious"


def test_a_cache_without_locks_is_read(sources: Path, tmp_path: Path) -> None:
    """A cache that one user fills and others only read."""
    built = build(MODULE, "90a", tmp_path / "cache", sources)
    lock = built.library.parent.with_name(f"{built.library.parent.name}.lock")
    lock.unlink()
    lock.mkdir()  # no lock can be opened there, as in a folder without write permission

    assert build(MODULE, "90a", tmp_path / "cache", sources).path_taken == "cached"
    built.library.unlink()
    with pytest.raises(BuildError, match="expected a folder that can be written, or that holds"):
        build(MODULE, "90a", tmp_path / "cache", sources)


def test_a_cache_that_is_a_file_is_named(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.write_text("")
    with pytest.raises(BuildError, match=f"kernel cache {cache}: File exists; expected a folder"):
        build(MODULE, "90a", cache, sources)


@pytest.mark.parametrize(
    ("arguments", "variable", "message"),
    [
        (["--jobs", "0"], "auto", "--jobs 0: expected at least 1"),
        (["--arch", "90a"], "sometimes", "NEEDLEPOINT_KERNEL_BUILD='sometimes': expected one of"),
        (["--arch", "90a", "--out", "FILE"], "auto", "kernel cache .*: File exists"),
    ],
)
def test_kernels_refuses_in_a_line(
    arguments: list[str],
    variable: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """1 says that a variant spills; what cannot be compiled is 2."""
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv(building.BUILD_VARIABLE, variable)
    try:
        status: object = kernels.main([str(file) if a == "FILE" else a for a in arguments])
    except SystemExit as error:
        status = error.code

    assert status == 2
    assert re.search(message, capsys.readouterr().err)


def test_force_and_never(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv(building.BUILD_VARIABLE, "never")
    with pytest.raises(BuildError, match="NEEDLEPOINT_KERNEL_BUILD=never forbids compiling"):
        build(MODULE, "90a", cache, sources)
    monkeypatch.setenv(building.BUILD_VARIABLE, "force")
    assert [build(MODULE, "90a", cache, sources).path_taken for _ in range(2)] == ["built"] * 2
    monkeypatch.setenv(building.BUILD_VARIABLE, "never")
    assert build(MODULE, "90a", cache, sources).path_taken == "cached"
    monkeypatch.setenv(building.BUILD_VARIABLE, "sometimes")
    with pytest.raises(ValueError, match="'sometimes': expected one of"):
        build(MODULE, "90a", cache, sources)


def test_a_failed_build_leaves_nothing(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_ninja_file", stand_in(tmp_path / "runs", "false"))
    with pytest.raises(BuildError, match="kernel module query for sm_90a failed"):
        build(MODULE, "90a", tmp_path / "cache", sources)

    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_unknown_modules_and_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kernel module 'scores': expected one of"):
        build("scores", "90a", tmp_path)
    with pytest.raises(ValueError, match="architecture sm_80: expected one of"):
        build(MODULE, "80", tmp_path)


def test_every_module_includes_the_arithmetic() -> None:
    for module in MODULES:
        included = {path.relative_to(CSRC).as_posix() for path in headers(translation_unit(module))}
        assert "launch/launch.h" in included
        assert "common/arith.cuh" in included or module == "topk"  # which only compares


def test_every_source_is_part_of_a_module() -> None:
    used = {path for module in MODULES for path in headers(translation_unit(module))}
    assert used == {path for path in CSRC.rglob("*") if path.suffix in {".h", ".cuh"}}


def test_files_of_one_name_in_two_folders_count_apart(sources: Path) -> None:
    pool4, pool128 = (sources / folder / "pool.cuh" for folder in ("store4", "store128"))
    before = sources_sha256("steps", sources)
    first, second = pool4.read_bytes(), pool128.read_bytes()
    assert {pool4, pool128} <= set(headers(translation_unit("steps"), sources))
    pool4.write_bytes(second)
    pool128.write_bytes(first)
    assert sources_sha256("steps", sources) != before


KINDS = tuple(dict.fromkeys(variant.arguments for variant in VARIANTS))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_kernels_read_every_argument_by_name(kind: type[Arguments]) -> None:
    """A name that only C++ has does not compile; one that only Python has is found here."""
    declared = {name for _, name in cpp_fields(kind)}
    modules = {variant.module for variant in VARIANTS if variant.arguments is kind}
    for module in modules:
        text = "".join(path.read_text() for path in headers(translation_unit(module)))
        others = {v.arguments for v in MODULES[module]} - {kind}
        known = {name for other in others for _, name in cpp_fields(other)}
        read = set(re.findall(r"\ba\.([a-z_]+)\b", text))
        assert declared <= read
        assert read <= declared | known


def test_a_module_declares_the_arguments_of_its_launches() -> None:
    text = translation_unit("steps")
    for kind in (StoreArguments, StepArguments):
        fields = "".join(f"  {cpp} {name};\n" for cpp, name in cpp_fields(kind))
        assert f"struct {kind.__name__} {{\n{fields}}};" in text
    assert "double eps;" in text
    assert "TensorView norm_weight;" in text
    assert "QueryArguments" not in text


def test_modules_are_written_to_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "modules"
    assert kernels.main(["--write", str(folder)]) == 0
    written = capsys.readouterr().out.split()
    assert written == [str(folder / f"{module}.cu") for module in MODULES]
    for module in MODULES:
        assert (folder / f"{module}.cu").read_text() == translation_unit(module)
    assert kernels.main(["--write", str(folder)]) == 2
    assert "File exists; name a folder that is new" in capsys.readouterr().err


def test_variants_are_told_apart_by_name_and_symbol() -> None:
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    for variant in VARIANTS:
        assert [v.name for v in VARIANTS if variant.symbol in v.symbol] == [variant.name]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: store_name("prefill", 4, 256, "fp32", "bf16"), "ratio 4 with head_dim 256"),
        (lambda: store_name("prefill", 4, 128, "fp16", "bf16"), "input fp16: supported inputs"),
        (lambda: store_name("extend", 4, 128, "fp32", "bf16"), "mode 'extend'"),
        (lambda: store_name("prefill", 4, 128, "fp32", "584"), "row format 584 at head_dim 128"),
        (lambda: query_name("fp32", "fp32"), "query of fp32 to fp32"),
        (lambda: step_name("hadamard", 512), "step hadamard to fp32 at head_dim 512"),
    ],
)
def test_unsupported_variants_say_what_is_supported(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def log_of(module: str, spills: int = 0, smem: str = "") -> str:
    lines = []
    for variant in MODULES[module]:
        lines += [
            f"ptxas info    : Compiling entry function '_ZN{variant.symbol}EvP' for 'sm_90a'",
            f"    0 bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads",
            f"ptxas info    : Used 40 registers, used 1 barriers{smem}",
        ]
    return "\n".join(lines)


def test_the_compilers_report_is_read() -> None:
    uses = list(module_uses(MODULE, "90a", log_of(MODULE, smem=", 12336 bytes smem")))

    assert [use.variant for use in uses] == [variant.name for variant in MODULES[MODULE]]
    assert uses[0] == KernelUse("sm_90a", uses[0].variant, 40, 0, 12336, 0)
    assert uses[0].fault is None


def test_spills_and_too_much_shared_memory_are_faults() -> None:
    spilled = next(module_uses(MODULE, "90a", log_of(MODULE, spills=8)))
    assert spilled.fault is not None
    assert "16 bytes of spills" in spilled.fault
    large = ", 110000 bytes smem"
    assert next(module_uses(MODULE, "90a", log_of(MODULE, smem=large))).fault is None
    small_card = next(module_uses(MODULE, "120a", log_of(MODULE, smem=large))).fault
    assert small_card is not None
    assert "the card has 101376 a block" in small_card


def test_a_log_without_a_variant_is_refused() -> None:
    with pytest.raises(BuildError, match="no kernels in the compiler's output"):
        parse_log("nothing")
    with pytest.raises(BuildError, match=r"no kernel of variant .* in module query"):
        list(module_uses(MODULE, "90a", log_of("steps")))


def test_make_kernels_exits_by_what_it_found(
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = build(MODULE, "90a", tmp_path / "cache", sources)
    spills = 0

    def built(module: str, architecture: str, folder: Path) -> object:
        log = log_of(module, spills)
        return building.BuiltModule(module, architecture, result.key, result.library, log, "built")

    monkeypatch.setattr(kernels, "build", built)
    assert kernels.main(["--arch", "90a"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(VARIANTS)
    spills = 4
    assert kernels.main(["--arch", "90a"]) == 1
    assert "8 bytes of spills, expected none" in capsys.readouterr().err
