"""A client of the Responses API that wants its whole answer, whatever happens to gateways."""

import asyncio
from collections.abc import Callable
from typing import Any

from diptych_testkit.virtual_gateway import ConnectionLost, VirtualGateway

MODEL_PATH = "/v1/responses"
SILENCE_S = 12.0
"""Longer than a healthy stream is quiet: a keep-alive comes every 10 s."""
AGAIN_S = 0.5
_ENDS = ("response.completed", "response.incomplete", "response.failed")


class Reader:
    """Asks once, and goes on at any gateway after the last event it has seen.

    It asserts what it is promised: events numbered without a gap or a repeat, one end, and a text
    that is what the deltas said.

    Args:
        gateways: Those there are at the moment.
        body: What is asked, without `stream`.
    """

    def __init__(self, gateways: Callable[[], list[VirtualGateway]], body: dict[str, Any]) -> None:
        self._gateways = gateways
        self._body = {**body, "stream": True, "store": True}
        self._tries = 0
        self.response_id = ""
        self.last_number = -1
        self.text = ""
        self.end: dict[str, Any] | None = None

    async def read(self) -> None:
        """Read until the end."""
        while self.end is None:
            gateways = self._gateways()
            if gateways:
                self._tries += 1
                await self._read_at(gateways[self._tries % len(gateways)])
            if self.end is None:
                await asyncio.sleep(AGAIN_S)

    async def _read_at(self, gateway: VirtualGateway) -> None:
        if self.response_id:
            query = "stream=true"
            if self.last_number >= 0:
                query += f"&starting_after={self.last_number}"
            exchange = gateway.ask("GET", f"{MODEL_PATH}/{self.response_id}", query)
        else:
            exchange = gateway.ask("POST", MODEL_PATH, body=self._body)
        try:
            async for event in exchange.events(SILENCE_S):
                if "sequence_number" in event:
                    self._take(event)
        except ConnectionLost:
            pass
        finally:
            exchange.leave()

    def _take(self, event: dict[str, Any]) -> None:
        assert self.end is None, f"{event} after the end"
        number = event["sequence_number"]
        assert number == self.last_number + 1, f"{event} after number {self.last_number}"
        self.last_number = number
        if event["type"] == "response.created":
            self.response_id = event["response"]["id"]
        elif event["type"] == "response.output_text.delta":
            self.text += event["delta"]
        elif event["type"] == "response.output_text.done":
            assert event["text"] == self.text, "the whole text is not the sum of its parts"
        elif event["type"] in _ENDS:
            self.end = event["response"]
