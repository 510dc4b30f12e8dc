"""The kernel cache as ``doctor --caches`` lists it: what is stale, why, and what is removed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from needlepoint.optimized.build import cache as kernel_cache
from needlepoint.optimized.build import compile as building
from needlepoint.optimized.build.cache import cached_modules, purge_stale, variant_traits
from needlepoint.optimized.build.compile import BuiltModule, build
from needlepoint.optimized.build.toolchain import CSRC, FLAGS, BuildError, Toolchain
from needlepoint.optimized.build.variants import BY_NAME, MODULES

MODULE = "query"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the CUDA sources, with a compiler that copies."""
    ninja = shutil.which("ninja")
    assert ninja is not None
    folder = tmp_path / "csrc"
    shutil.copytree(CSRC, folder)
    tools = Toolchain(Path("nvcc"), Path(ninja), tmp_path, tmp_path, tmp_path / "x.so", "stand-in")
    for module in (building, kernel_cache):
        monkeypatch.setattr(module, "toolchain", lambda: tools)
    rule = "rule copy\n  command = cp $in $out\n"
    monkeypatch.setattr(
        building, "_ninja_file", lambda name, *_: f"{rule}build {name}.so: copy {name}.cu\n"
    )
    monkeypatch.delenv(building.BUILD_VARIABLE, raising=False)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def built(sources: Path, cache: Path) -> BuiltModule:
    return build(MODULE, "90a", cache, sources)


def test_a_fresh_build_is_current(built: BuiltModule, sources: Path, cache: Path) -> None:
    (found,) = cached_modules(cache, sources)
    assert found.stale is None
    assert (found.module, found.architecture, found.flags) == (MODULE, "90a", FLAGS)
    assert found.variants == tuple(variant.name for variant in MODULES[MODULE])
    assert found.sources_sha256 == building.sources_sha256(MODULE, sources)
    assert 0 <= found.age_s < 3600
    assert purge_stale(cache, sources) == ()
    assert built.library.exists()


def manifest(built: BuiltModule, **changes: object) -> None:
    path = built.library.parent / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("header", "its sources changed"),
        ("flags", "the compiler flags changed"),
        ("compiler", "the compiler changed"),
        ("library", "damaged: library and manifest do not agree"),
        ("manifest", "damaged: library and manifest do not agree"),
        ("module", "there is no module gone any more"),
        ("architecture", "no kernel is written for sm_80 any more"),
    ],
)
def test_a_stale_module_is_named_and_removed(
    how: str, why: str, built: BuiltModule, sources: Path, cache: Path
) -> None:
    folder = built.library.parent
    if how == "header":
        with (sources / "query/query.cuh").open("a") as file:
            file.write("// edited\n")
    elif how in ("flags", "compiler"):
        manifest(built, **{how: ["-O0"] if how == "flags" else "older"})
    elif how in ("library", "manifest"):
        (built.library if how == "library" else folder / "manifest.json").write_text("half")
    else:
        name = "gone-sm_90a" if how == "module" else f"{MODULE}-sm_80"
        folder.rename(cache / f"{name}-{built.key}")
    (found,) = cached_modules(cache, sources)
    assert found.stale == why
    assert [removed.folder for removed in purge_stale(cache, sources)] == [found.folder]
    assert cached_modules(cache, sources) == ()


def test_without_a_compiler_sources_still_decide(
    built: BuiltModule, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> Toolchain:
        raise BuildError("no nvcc")

    monkeypatch.setattr(kernel_cache, "toolchain", none)
    manifest(built, compiler="older")
    assert cached_modules(cache, sources)[0].stale is None
    (sources / "query/query.cuh").write_text("")
    assert cached_modules(cache, sources)[0].stale == "its sources changed"


def test_a_module_that_is_being_built_is_left_alone(
    built: BuiltModule, sources: Path, cache: Path
) -> None:
    manifest(built, flags=[])
    with (cache / f"{built.library.parent.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert purge_stale(cache, sources) == ()
    assert built.library.exists()
    assert len(purge_stale(cache, sources)) == 1


def test_only_what_a_build_left_is_removed(built: BuiltModule, sources: Path, cache: Path) -> None:
    manifest(built, flags=[])
    other, link = cache / "photos", cache / f"{MODULE}-sm_90a-{'0' * 32}"
    other.mkdir()
    link.symlink_to(other)
    young, old = cache / ".query-abcdefgh", cache / ".query-hgfedcba"
    young.mkdir()
    old.mkdir()
    past = time.time() - 2 * kernel_cache.ABANDONED_AFTER_S
    os.utime(old, (past, past))
    removed = purge_stale(cache, sources)
    assert {entry.stale for entry in removed} == {
        "the compiler flags changed",
        "a build that never finished",
    }
    assert other.is_dir()
    assert link.is_symlink()
    assert young.is_dir()
    assert not old.exists()


def test_no_cache_is_empty(tmp_path: Path) -> None:
    assert cached_modules(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("store_prefill_r4_d128_fp32_fp8", ("fp32", "128", "fp8")),
        ("store_decode_r128_d512_bf16_584", ("bf16", "512", "584")),
        ("store_decode_r4_d128_bf16_bf16", ("bf16", "128", "bf16")),
        ("query_fp32_bf16", ("fp32", "", "bf16")),
        ("pool_r4_d512_bf16", ("bf16", "512", "")),
        ("step_rope_d512", ("", "512", "")),
        ("step_store_d128_bf16", ("", "128", "bf16")),
    ],
)
def test_traits_of_a_variant(name: str, traits: tuple[str, str, str]) -> None:
    assert name in BY_NAME
    found = variant_traits(name)
    assert (found.inputs, found.head_dim, found.row) == traits
