"""`python -m diptych_scheduler`."""

import os
import sys

from diptych_chassis.running import run
from diptych_chassis.settings import read_settings
from diptych_scheduler.app import serve
from diptych_scheduler.settings import SchedulerSettings

if __name__ == "__main__":
    settings = read_settings(SchedulerSettings, "scheduler", os.environ)
    sys.exit(run("scheduler", settings, lambda member: serve(member, settings)))
