"""What the machine keeps: compiled programs, and memory that was freed."""

import jax
import pytest

from heinsen import host

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def without_cache():
    """Undo what the test sets."""
    before = {name: jax.config.values[name] for name in OPTIONS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compilations_are_kept_in_the_users_cache_by_kind_of_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    host.keep_compilations()
    (folder,) = (tmp_path / "heinsen" / "compiled").iterdir()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(host.platform, "machine", lambda: "another")
    host.keep_compilations()
    assert jax.config.jax_compilation_cache_dir not in (None, str(folder))


def test_a_folder_that_is_named_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    host.keep_compilations()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own") and not any(tmp_path.iterdir())


def test_without_a_folder_that_can_be_written_nothing_is_kept(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    host.keep_compilations()
    assert jax.config.jax_compilation_cache_dir is None
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)  # of no user, so that there is no home
    host.keep_compilations()
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_freed_memory_is_kept_on_cpus_until_it_is_returned(monkeypatch, backend):
    calls = []

    class Library:
        def __getattr__(self, name):
            return lambda *arguments: calls.append((name, *arguments))

    monkeypatch.setattr("ctypes.CDLL", lambda name: Library())
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    host.keep_host_memory()
    assert calls == ([("mallopt", -4, 0), ("mallopt", -1, -1), ("mallopt", -2, 64 << 20)] if backend == "cpu" else [])
    host.return_freed_memory()
    assert calls[-1] == ("malloc_trim", 0)
