"""`diptych doctor`: can this machine run the stack, and if not, what to do."""

from diptych_cli import checks
from diptych_cli.checks import Grade


def doctor(port: int) -> int:
    """Print every finding; 1 if something needed is missing."""
    missing = 0
    for finding in checks.everything(port):
        print(f"{finding.grade.value} {finding.about}: {finding.found}", flush=True)
        if finding.advice:
            print(f"    {finding.advice}", flush=True)
        missing += finding.grade is Grade.MISSING
    print(f"\n{missing} missing" if missing else "\nReady: diptych up")
    return 1 if missing else 0
