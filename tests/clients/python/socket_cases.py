"""Autobahn's cases against the WebSocket server at `DIPTYCH_URL`: prints a verdict per case."""

import asyncio
import json
import os

import kosoku


async def main() -> None:
    try:
        results = await kosoku.run_fuzzingclient(os.environ["DIPTYCH_URL"], concurrency=2)
    except kosoku.FailureError as err:
        results = err.results
    print(json.dumps({r.case_id: "OK" if r.passed else r.behavior.value for r in results}))


asyncio.run(main())
