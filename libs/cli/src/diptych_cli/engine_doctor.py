"""`diptych doctor engine`: is this engine there, which one is it, and can its adapter use it?"""

import asyncio

from diptych_cli.checks import Grade
from diptych_engine.examining import Examined, examine

_GRADES = {"fine": Grade.FINE, "note": Grade.NOTE, "missing": Grade.MISSING}


def engine_doctor(name: str, url: str) -> int:
    """Print every finding; 1 if the adapter could not work so."""
    return asyncio.run(_print(Examined(name, url)))


async def _print(examined: Examined) -> int:
    missing = 0
    async for finding in examine(examined):
        grade = _GRADES[finding.grade]
        print(f"{grade.value} {finding.about}: {finding.found}", flush=True)
        if finding.advice:
            print(f"    {finding.advice}", flush=True)
        missing += grade is Grade.MISSING
    print(f"\n{missing} missing" if missing else f"\nReady: {examined.name}")
    return 1 if missing else 0
