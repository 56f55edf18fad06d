"""`python -m diptych_decode_worker`."""

import os
import sys

from diptych_chassis.running import run
from diptych_chassis.settings import read_settings
from diptych_decode_worker.app import serve
from diptych_decode_worker.settings import DecodeWorkerSettings

if __name__ == "__main__":
    settings = read_settings(DecodeWorkerSettings, "decode-worker", os.environ)
    sys.exit(run("decode-worker", settings, lambda member: serve(member, settings)))
