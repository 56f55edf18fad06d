"""`python -m diptych_power_governor`."""

import os
import sys

from diptych_chassis.running import run
from diptych_chassis.settings import read_settings
from diptych_power_governor.app import serve
from diptych_power_governor.settings import GovernorSettings

if __name__ == "__main__":
    settings = read_settings(GovernorSettings, "power-governor", os.environ)
    sys.exit(run("power-governor", settings, lambda member: serve(member, settings)))
