"""Finding backends: by name, by value, by entry point (SPEC REG-2 to REG-5)."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata

from gmm._protocol import Backend

ENTRY_POINT_GROUP = "gmm.backends"

# What "auto" considers on each platform, so that it loads no module it does not need; a
# backend registered in this process takes part through its `auto_rank`.
AUTO_NAMES = {
  "cpu": ("reference",),
  "gpu": ("xla", "reference"),
  "tpu": ("tokamax_v1", "megablox", "reference"),
}

# Backends registered by hand in this process, newest last. The only mutable state of the
# package: a registry is one.
_registered: list[Backend] = []


@functools.cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
  return {e.name: e for e in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


@functools.cache
def _load(name: str) -> Backend:
  """Loads an entry point: a Backend, or a function of no arguments that returns one."""
  entry = _entry_points()[name]
  loaded = entry.load()
  backend = loaded if isinstance(loaded, Backend) else loaded()
  if not isinstance(backend, Backend):
    raise TypeError(f"it must give a gmm.Backend, got {type(backend).__name__}")
  if backend.name != name:
    raise ValueError(f"it gives a backend named {backend.name!r}; the two names must be equal")
  return backend


class _Registration:
  """What `register_backend` returns; leaving its `with` block removes the backend."""

  def __init__(self, backend: Backend):
    self.backend = backend

  def __enter__(self) -> Backend:
    return self.backend

  def __exit__(self, *exc_info) -> None:
    _registered[:] = [b for b in _registered if b is not self.backend]


def register_backend(backend: Backend) -> _Registration:
  """Registers a backend under its name for this process (SPEC REG-3).

  Args:
    backend: a `gmm.Backend`.

  Returns:
    A context manager: as `with register_backend(b):` the registration ends with the block,
    called plainly it stays.

  Raises:
    TypeError: not a `Backend`.
    ValueError: the name is taken, or is "auto".
  """
  if not isinstance(backend, Backend):
    raise TypeError(f"register_backend needs a gmm.Backend, got {type(backend).__name__}.")
  if backend.name == "auto":
    raise ValueError("The name 'auto' asks for a choice by platform; give the backend another name.")
  if backend.name in _known_names():
    raise ValueError(f"A backend named {backend.name!r} exists already; give yours another name.")
  _registered.append(backend)
  return _Registration(backend)


def _known_names() -> list[str]:
  return sorted({*_entry_points(), *(b.name for b in _registered)})


def backends() -> dict[str, str | None]:
  """Lists the known backends (SPEC REG-2).

  Returns:
    Name -> None when it loads, or the reason why it does not. A broken entry point of a
    third party is named here and hurts nobody else.
  """
  listed: dict[str, str | None] = {}
  for name in _known_names():
    try:
      get_backend(name)
      listed[name] = None
    except ImportError as error:
      listed[name] = str(error)
  return listed


def get_backend(name: str | Backend) -> Backend:
  """Returns the backend of that name (SPEC REG-2).

  Args:
    name: a name from `backends()`, or a `Backend`, returned as it is.

  Raises:
    ValueError: an unknown name; the message lists the known ones and the closest.
    ImportError: the entry point of that name cannot be loaded; the message names the cause.
    TypeError: neither a name nor a `Backend`.
  """
  if isinstance(name, Backend):
    return name
  if not isinstance(name, str):
    raise TypeError(f"backend must be a name or a gmm.Backend, got {type(name).__name__}.")
  for backend in reversed(_registered):
    if backend.name == name:
      return backend
  if name in _entry_points():
    try:
      return _load(name)
    except Exception as error:  # whatever a third party's import raises is named, not hidden
      value = getattr(_entry_points()[name], "value", "?")
      raise ImportError(f"Backend {name!r} ({value}) cannot be loaded: {type(error).__name__}: {error}") from error
  close = difflib.get_close_matches(name, _known_names(), n=1)
  hint = f" Did you mean {close[0]!r}?" if close else ""
  if not _entry_points():
    hint += " No entry points are installed: run `pip install -e .` or `uv sync` in the checkout."
  raise ValueError(f"Unknown backend {name!r}; known: {', '.join(['auto', *_known_names()])}.{hint}")


def auto_backends(platform: str) -> tuple[list[Backend], dict[str, str]]:
  """The backends that "auto" tries on a platform, best first, and why others could not be loaded (SPEC REG-4)."""
  found: list[Backend] = list(_registered)
  missing: dict[str, str] = {}
  for name in AUTO_NAMES.get(platform, ("reference",)):
    try:
      found.append(get_backend(name))
    except (ImportError, ValueError) as error:
      missing[name] = str(error)
  ranked = {i: dict(b.auto_rank)[platform] for i, b in enumerate(found) if platform in dict(b.auto_rank)}
  return [found[i] for i in sorted(ranked, key=lambda i: ranked[i])], missing
