"""Which models are served, and what a gateway needs to speak to each.

Workers say what they serve in bucket `workers`; a model's card (tokenizer, template, limits) comes
from the object store, and its codec is built once per fingerprint, off the event loop.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from diptych_bus.port import Bus, Gone, Kept, Subscription
from diptych_contracts import subjects
from diptych_contracts.cards import Fingerprint, ModelCard
from diptych_contracts.errors import DiptychError, Transient, UnknownModel
from diptych_contracts.fleet import WorkerRegistration
from diptych_contracts.streams import MODELS, WORKERS
from diptych_contracts.wire import decode
from diptych_gateway.parser_settings import ParserSettings
from diptych_telemetry import logger
from diptych_text.codec import TextCodec

_RETRY_S = 0.5
_LOAD_S = 5.0
"""For fetching a card, at first."""
_MOST_LOAD_S = 80.0
"""After tries that were too short: on a busy machine every one of 5 s was, for ever."""
_SHOWN_CHARS = 80
_STANDSTILL_S = 10.0
"""Building a codec lets no thread run: 0.12 s for 49,000 tokens, of which models have 250,000, and
a busy machine takes ten times as long."""

Patience = Callable[[float], AbstractAsyncContextManager[None]]

log = logger(__name__)


def _unannounced(_longer_s: float) -> AbstractAsyncContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and the codecs that speak its tokens: a codec belongs to one thread."""

    card: ModelCard
    codec: TextCodec
    """For the event loop."""
    far_codec: TextCodec
    """For the executor's thread."""

    @classmethod
    def from_card(cls, card: ModelCard) -> "ServedModel":
        """Build the codecs, about 0.2 s each. Raises `Permanent` for a broken card."""
        return cls(card, TextCodec.from_card(card), TextCodec.from_card(card))


class Models:
    """The models workers offer now.

    Args:
        bus: Where workers register and cards are kept.
        executor: Of one thread, which builds codecs and tokenizes long texts.
        patience: Asks the others not to take a standstill of that many seconds for death.
        parsers: What an operator says of how models write.
    """

    def __init__(
        self,
        bus: Bus,
        executor: Executor,
        patience: Patience = _unannounced,
        *,
        parsers: ParserSettings | None = None,
    ) -> None:
        self._parsers = parsers or ParserSettings()
        self._bus = bus
        self._executor = executor
        self._patience = patience
        self._offers: dict[str, WorkerRegistration] = {}
        self._loaded: dict[str, ServedModel] = {}
        self._stale: dict[str, Fingerprint] = {}
        self._load_s = _LOAD_S
        self._news = asyncio.Event()
        self._watch: Subscription | None = None

    def __iter__(self) -> Iterator[ModelCard]:
        offered = {offer.model for offer in self._offers.values()}
        return (self._loaded[name].card for name in sorted(offered) if name in self._loaded)

    @property
    def workers(self) -> Collection[str]:
        """Everybody who offers something."""
        return self._offers.keys()

    def offers(self, model: str) -> list[WorkerRegistration]:
        """Those who serve `model`."""
        return [offer for offer in self._offers.values() if offer.model == model]

    def get(self, model: str) -> ServedModel:
        """The model of that name.

        Raises:
            UnknownModel: nobody ever offered it here.
            Transient: it is known, but at this moment nobody serves it.
        """
        offered = any(offer.model == model for offer in self._offers.values())
        if offered and model in self._loaded:
            return self._loaded[model]
        if offered or model in self._loaded:
            raise Transient(f"the model '{model}' has no worker ready at the moment")
        served = ", ".join(f"'{card.model}'" for card in self) or "none"
        raise UnknownModel(
            f"the model '{model[:_SHOWN_CHARS]}' is not served here; served: {served}",
            param="model",
        )

    async def start(self) -> None:
        """Learn who is there, and load their cards."""
        bucket = self._bus.bucket(WORKERS, WorkerRegistration)
        self._watch = await bucket.watch(self._on_change)
        await self._load_stale()

    async def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            await self._watch.close()

    async def run(self) -> None:
        """Load the cards of newcomers until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._stale:
                await self._load_stale()
                if self._stale:
                    await asyncio.sleep(_RETRY_S)

    def _on_change(self, change: Kept[WorkerRegistration] | Gone) -> None:
        if isinstance(change, Gone):
            self._offers.pop(change.key, None)
            return
        offer = change.value
        self._offers[change.key] = offer
        loaded = self._loaded.get(offer.model)
        if loaded is None or loaded.card.fingerprint.base != offer.fingerprint.base:
            self._stale[offer.model] = offer.fingerprint
            self._news.set()

    async def _load_stale(self) -> None:
        for model, fingerprint in list(self._stale.items()):
            try:
                settled = await self._load(model, fingerprint)
            except Transient as err:
                log.warning("model_card_unreachable", model=model, error=str(err))
                continue
            except DiptychError as err:
                log.error("model_card_unusable", model=model, error=str(err))
                settled = True
            if settled and self._stale.get(model) == fingerprint:
                del self._stale[model]

    async def _fetched(self, model: str) -> bytes | None:
        """The bytes of a card. Raises `Transient`."""
        try:
            async with asyncio.timeout(self._load_s):
                data = await self._bus.get_object(MODELS, subjects.escape(model))
        except TimeoutError as err:
            took_s, self._load_s = self._load_s, min(2 * self._load_s, _MOST_LOAD_S)
            raise Transient(f"no card of '{model}' from the bus within {took_s:g} s") from err
        self._load_s = _LOAD_S
        return data

    async def _load(self, model: str, fingerprint: Fingerprint) -> bool:
        """Load a card; False if it is not there yet. Raises `Transient`."""
        data = await self._fetched(model)
        if data is None:
            return False
        # No deadline from here on: what is given up is built to its end nevertheless, and the next
        # try stands in line behind it. A machine that needs longer would never serve.
        card = self._parsers.applied(decode(data, ModelCard))
        loaded = self._loaded.get(model)
        if loaded is None or loaded.card != card:
            loop = asyncio.get_running_loop()
            async with self._patience(_STANDSTILL_S):
                self._loaded[model] = await loop.run_in_executor(
                    self._executor, ServedModel.from_card, card
                )
            log.info("model_ready", model=model, context_tokens=card.context_tokens)
        if card.fingerprint.base != fingerprint.base:
            log.warning(
                "worker_with_other_base",
                model=model,
                expected=card.fingerprint.base,
                seen=fingerprint.base,
            )
        return True
