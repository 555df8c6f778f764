"""Where a judge is asked, as a recipe or a command says it."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headwater.errors import ConfigError

_OURS = frozenset({"model", "messages", "stream"})


class EndpointConfig(BaseModel):
    """Where to ask, and how patiently.

    `base_url` is what comes before `/chat/completions`, such as https://api.openai.com/v1. The API key is
    read from the environment variable `api_key_env`; none is sent unless one is named. `timeout_s` holds for
    one try, of which there are 1 + `retries`, with `backoff_s` · 2^n (± half) between them or what the
    server asks for. Prices are per million tokens; at `max_cost` no more is asked, though up to `concurrency`
    requests that are under way then are still paid for. `extra` goes into every request as it is, for what only
    some servers understand, and `omit` names fields that a server refuses, such as "seed".
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    model: str = Field(min_length=1)
    api_key_env: str | None = None
    timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    retries: int = Field(default=4, ge=0, le=20)
    backoff_s: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    concurrency: int = Field(default=8, ge=1)
    max_body_bytes: int = Field(default=4_000_000, ge=1)
    input_price: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    output_price: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_cost: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    extra: dict[str, Any] = Field(default_factory=dict)
    omit: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _can_work(self) -> EndpointConfig:
        _check_address(self.base_url)
        if self.max_cost is not None and not self.input_price and not self.output_price:
            raise ConfigError(
                "The judge's max_cost has no effect while its prices are 0. Set input_price and output_price, per "
                "million tokens."
            )
        if wrong := sorted(_OURS & {*self.extra, *self.omit}):
            raise ConfigError(
                f"The judge's extra and omit cannot name '{wrong[0]}', which every request needs as it is."
            )
        try:
            json.dumps(self.extra, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"The judge's extra cannot be sent as JSON: {error}.") from error
        return self

    @property
    def address(self) -> str:
        """Where requests go."""
        return f"{self.base_url.rstrip('/')}/chat/completions"

    @property
    def local(self) -> bool:
        """Whether this machine is asked, to which no proxy leads."""
        host = urlsplit(self.base_url).hostname or ""
        return host in ("localhost", "::1") or host.startswith("127.")


def _check_address(found: str) -> None:
    wanted = "wanted an address that starts with http:// or https://"
    try:
        url = urlsplit(found)
        host, _ = url.hostname, url.port  # reading the port checks it
    except ValueError as error:
        raise ConfigError(f"The judge's base_url {found!r} is no address ({error}); {wanted}.") from error
    if (
        url.scheme not in ("http", "https")
        or not host
        or not found.isascii()
        or not found.isprintable()
        or " " in found
    ):
        raise ConfigError(f"The judge's base_url is {found!r}; {wanted}.")
    if url.username is not None or url.query or url.fragment:
        raise ConfigError(
            f"The judge's base_url on {host} has a password, a query or a fragment in it. Leave them out; "
            "name the environment variable that holds the key as api_key_env."
        )
