"""A backend by name, by value, or by "package.module:object"."""

from __future__ import annotations

import importlib
import os
import sys

from gmm import _registry
from gmm._protocol import Backend


def load_backend(backend: str | Backend) -> Backend:
  """The backend that is meant.

  Args:
    backend: a `gmm.Backend`; a name that `gmm.get_backend` knows; or "package.module:object", where the
      object is a `gmm.Backend` or a function of no arguments that returns one. The working directory is
      searched too.

  Raises:
    ValueError: an unknown name, or no object of that name in the module.
    ImportError: the module or the object cannot be loaded; the message names the cause, and the error it was
      raised from has the traceback.
  """
  if not isinstance(backend, str) or ":" not in backend:
    return _registry.get_backend(backend)
  module_name, _, path = backend.partition(":")
  if not module_name or not path or any(not part.isidentifier() for part in path.split(".")):
    raise ValueError(f"{backend!r} is not of the form 'package.module:object'.")
  try:
    _search_working_directory()
    found = importlib.import_module(module_name)
  except Exception as error:  # whatever a third party's import raises is named
    raise ImportError(f"Module {module_name!r} cannot be imported: {type(error).__name__}: {error}") from error
  for part in path.split("."):
    if not hasattr(found, part):
      known = [n for n, v in vars(found).items() if isinstance(v, Backend)] if hasattr(found, "__dict__") else []
      hint = f" It has the backends {', '.join(known)}." if known else ""
      raise ValueError(f"Module {module_name!r} has no object {path!r}.{hint}")
    found = getattr(found, part)
  if not isinstance(found, Backend) and callable(found):
    try:
      found = found()
    except Exception as error:
      raise ImportError(f"{backend!r} cannot be made: {type(error).__name__}: {error}") from error
  if not isinstance(found, Backend):
    raise ImportError(f"{backend!r} is a {type(found).__name__}, must be a gmm.Backend or a function that returns one.")
  return found


def _search_working_directory() -> None:
  """As `python -m` does; it stays, for what the module imports later."""
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
