"""`python -m diptych_gateway`."""

import os
import sys
from functools import partial

import uvloop

from diptych_chassis.running import run
from diptych_chassis.settings import read_settings
from diptych_gateway.app import SERVICE, serve
from diptych_gateway.settings import GatewaySettings

SETTINGS = read_settings(GatewaySettings, SERVICE, os.environ)
sys.exit(run(SERVICE, SETTINGS, partial(serve, settings=SETTINGS), loop_factory=uvloop.Loop))
