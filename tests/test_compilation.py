"""What is compiled is kept, and a damaged or exchanged program is compiled again instead of run."""

import os
import shutil

import jax
import jax.numpy as jnp
import pytest

from svb_jax.training.compilation import cached_compilation


def _answers(folder):
    """Compile two programs, or find them in the folder, and return what they compute."""
    jax.clear_caches()
    with cached_compilation(folder):
        return [float(jax.jit(function)(jnp.float32(3))) for function in (_double, _square)]


def _double(x):
    return jnp.sin(x) * 0 + 2 * x


def _square(x):
    return jnp.cos(x) * 0 + x * x + 1


@pytest.fixture
def entries(tmp_path):
    previous = {
        name: jax.config.values[name]
        for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    }
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    assert _answers(tmp_path) == [6.0, 10.0]
    found = [path for path in tmp_path.glob("*-cache") if "_double" in path.name or "_square" in path.name]
    assert len(found) == 2
    yield found
    for name, value in previous.items():
        jax.config.update(name, value)


def test_programs_are_found_again(entries):
    before = [path.stat().st_ino for path in entries]
    assert _answers(entries[0].parent) == [6.0, 10.0]
    assert [path.stat().st_ino for path in entries] == before


def test_exchanged_programs_are_compiled_again(entries):
    first, second = entries
    kept = first.with_name("kept")
    shutil.copy(first, kept)
    shutil.copy(second, first)
    shutil.copy(kept, second)
    assert _answers(first.parent) == [6.0, 10.0]
    # They were written anew.
    assert _answers(first.parent) == [6.0, 10.0]
    assert first.read_bytes() != second.read_bytes()


@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda _: b""])
def test_damaged_programs_are_compiled_again(entries, damage):
    for path in entries:
        path.write_bytes(damage(path.read_bytes()))
    assert _answers(entries[0].parent) == [6.0, 10.0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_removed_and_compiled_again(make, entries):
    for path in entries:
        path.unlink()
        make(path)
    assert _answers(entries[0].parent) == [6.0, 10.0]
    assert all(path.is_file() for path in entries)


def test_every_flipped_bit_is_noticed(entries):
    path = entries[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    inode = path.stat().st_ino
    assert _answers(path.parent) == [6.0, 10.0]
    assert path.stat().st_ino != inode or path.read_bytes() != bytes(content)


def test_a_folder_that_cannot_be_made_is_done_without(entries):
    # JAX would warn of it, and warnings are errors here.
    assert _answers(entries[0] / "below_a_file") == [6.0, 10.0]
