"""Creates streams and buckets where no `diptych up` does, and stays to do it again.

    python -m diptych_chassis.containers.provider

A server that comes back with an empty disk ends every process; this one, started anew, makes what
is missing, and the others wait for it.
"""

import os
import sys

from diptych_chassis.member import Member
from diptych_chassis.running import run
from diptych_chassis.settings import ServiceSettings, read_settings

SERVICE = "supervisor"


async def serve(member: Member) -> None:
    """All that is to do was done on joining."""
    member.ready(True)
    await member.stopping.wait()


if __name__ == "__main__":
    sys.exit(run(SERVICE, read_settings(ServiceSettings, SERVICE, os.environ), serve))
