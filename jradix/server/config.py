"""What a server is told when it starts, beside its engine's configuration."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from jradix import validation

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where and how to serve.

    Attributes:
        host: the address to listen on; 0.0.0.0 is all of this machine's.
        port: of the address. 0 takes a free one, which the log names.
        api_key: what clients send as `Authorization: Bearer KEY`; /health alone answers without it. None: the variable
            JRADIX_API_KEY, and if there is none, everybody may come in.
        admin_api_key: what operators send instead, who may use all routes, and then nobody else theirs. None: the
            variable JRADIX_ADMIN_API_KEY, and if there is none, clients are trusted like operators.
        served_model_name: the model's name in OpenAI's API. None: model_path.
        log_level: what is logged to standard error; "info" has a line for each request, without its text.
        max_body_mb: the most MiB that the body of a request may have.
        drain_seconds: how long requests may still run after SIGTERM or Ctrl-C, before they are aborted.
        health_seconds: how long the engine may have work and make no step until /health_generate reports it.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    admin_api_key: str | None = None
    served_model_name: str | None = None
    log_level: LogLevel = "info"
    max_body_mb: int = 64
    drain_seconds: int = 30
    health_seconds: int = 20

    def __post_init__(self) -> None:
        for name, high in (("port", 65535), ("max_body_mb", 65536), ("drain_seconds", None), ("health_seconds", None)):
            validation.integer(name, getattr(self, name), low=0 if name in ("port", "drain_seconds") else 1, high=high)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("host", "api_key", "admin_api_key", "served_model_name") and value is not None:
                validation.text(field.name, value)
        if self.api_key is not None and self.api_key == self.admin_api_key:
            raise ValueError("admin_api_key must differ from api_key: with the same, every client is an operator")
        if self.log_level not in get_args(LogLevel):
            raise ValueError(f"log_level must be one of {', '.join(get_args(LogLevel))}, got {self.log_level!r}")
