"""One case run again: from its repr, from a script to paste, from the command line."""

from __future__ import annotations

import ast
import shlex

from gmm._protocol import Backend
from gmm._recipe import recipe_names
from gmm.conformance import _checks
from gmm.conformance._case import BOTH_DTYPES, DATA_KINDS, Case
from gmm.conformance._load import load_backend
from gmm.conformance._result import Result

_FORM = "Case(m=4, k=2, n=2, group_sizes=(1, 0), dtype='float32', data='integers', seed=0, recipe='bf16')"


def parse_case(text: str) -> Case:
  """The case of a repr, read as a literal: nothing in it is executed.

  Raises:
    ValueError: not of that form, or no legal case.
  """
  wrong = lambda why: ValueError(f"{text!r} is no case: {why}. It must look like {_FORM}.")
  try:
    call = ast.parse(text.strip(), mode="eval").body
  except SyntaxError as error:
    raise wrong(f"{error.msg}") from None
  if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Case"):
    raise wrong("it is no call of Case")
  try:
    args = [ast.literal_eval(a) for a in call.args]
    named = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    case = Case(*args, **named)
  except (ValueError, TypeError) as error:
    raise wrong(str(error)) from None
  for name in ("m", "k", "n", "seed"):
    value = getattr(case, name)
    if not isinstance(value, int) or value < 0:
      raise wrong(f"{name} is {value!r}, must be an integer of at least 0")
  sizes = case.group_sizes
  if not isinstance(sizes, tuple) or not all(isinstance(s, int) and s >= 0 for s in sizes) or sum(sizes) > case.m:
    raise wrong(f"group_sizes is {sizes!r}, must be a tuple of integers of at least 0 that add up to at most m")
  for name, known in (("dtype", BOTH_DTYPES), ("data", DATA_KINDS), ("recipe", recipe_names())):
    if getattr(case, name) not in known:
      raise wrong(f"{name} is {getattr(case, name)!r}, must be one of {', '.join(known)}")
  return case


def run_case(check: str, backend: str | Backend, case: Case | None) -> float | None:
  """Runs one check on one case.

  Args:
    check: its id, for example "GMM-1:rows_of_groups".
    backend: a `gmm.Backend`, its name, or "package.module:object".
    case: the case; None for a check that needs none.

  Returns:
    The worst error/bound, or None where the check is exact.

  Raises:
    Violation: what the clause forbids; its `evidence` has the arrays.
    gmm.Unsupported: the backend declines the case.
    ValueError: no check has that id; the backend is unknown.
  """
  known = {c.id: c for c in _checks.CHECKS}
  if check not in known:
    raise ValueError(f"No check {check!r}; known: {', '.join(known)}.")
  return known[check].run(load_backend(backend), case)


def script(result: Result, backend: str | None = None) -> str:
  """A script that runs a failing check on its case again, ready to paste.

  Args:
    result: the failure.
    backend: what `load_backend` finds the backend by; None for its name.
  """
  name = backend or ("reference" if result.backend == "(library)" else result.backend)
  lines = ["from gmm.conformance import Case, run_case", ""]
  if isinstance(result.case, Case):
    lines += [
      f"case = {result.case!r}",
      "# its arrays: case.lhs [m, k], case.rhs [g, k, n], case.dout [m, n], case.sizes",
    ]
  else:
    lines += [f"case = {result.case!r}"]
  return "\n".join([*lines, f"run_case({result.check.id!r}, {name!r}, case)"])


def command(result: Result, backend: str | None = None) -> str:
  """The same as a command line, "" for a check without a case."""
  if not isinstance(result.case, Case):
    return ""
  # A repr has single quotes and nothing that a shell expands inside double ones.
  start = shlex.join(["gmm", "check", backend or result.backend, "--clause", result.check.id])
  return f'{start} --case "{result.case!r}"'
