"""Property checks that hold any backend to SPEC.md.

`check_backend(backend)` runs them and reports; `parametrize_with_checks(backend)` makes pytest tests of
them; `checks()` lists them; each draws `Case`s, and `run_case` runs one again.
"""

from gmm.conformance._bounds import error_bound as error_bound
from gmm.conformance._case import Case as Case
from gmm.conformance._evidence import Evidence as Evidence
from gmm.conformance._html import write_html as write_html
from gmm.conformance._load import load_backend as load_backend
from gmm.conformance._parallel import check_in_processes as check_in_processes
from gmm.conformance._pytest import SuiteError as SuiteError
from gmm.conformance._pytest import parametrize_with_checks as parametrize_with_checks
from gmm.conformance._registry import Check as Check
from gmm.conformance._registry import Violation as Violation
from gmm.conformance._report import as_json as as_json
from gmm.conformance._report import print_report as print_report
from gmm.conformance._reproduce import command as command
from gmm.conformance._reproduce import parse_case as parse_case
from gmm.conformance._reproduce import run_case as run_case
from gmm.conformance._reproduce import script as script
from gmm.conformance._result import ConformanceError as ConformanceError
from gmm.conformance._result import Report as Report
from gmm.conformance._result import Result as Result
from gmm.conformance._run import check_backend as check_backend
from gmm.conformance._run import check_backends as check_backends
from gmm.conformance._run import checks as checks
from gmm.conformance._run import run_check as run_check
from gmm.conformance._run import select as select
from gmm.conformance._sanitize import sanitize as sanitize
from gmm.conformance._selftest import Verdict as Verdict
from gmm.conformance._selftest import print_verdicts as print_verdicts
from gmm.conformance._selftest import self_test as self_test
