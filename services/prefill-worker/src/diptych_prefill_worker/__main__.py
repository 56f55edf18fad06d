"""`python -m diptych_prefill_worker`."""

import os
import sys

from diptych_chassis.running import run
from diptych_chassis.settings import read_settings
from diptych_prefill_worker.app import serve
from diptych_prefill_worker.settings import PrefillWorkerSettings

if __name__ == "__main__":
    settings = read_settings(PrefillWorkerSettings, "prefill-worker", os.environ)
    sys.exit(run("prefill-worker", settings, lambda member: serve(member, settings)))
