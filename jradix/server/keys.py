"""Who may come in: clients with one key, operators with another."""

import base64
import binascii
import hmac

from fastapi import Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

OPEN_PATHS = frozenset(("/health",))
BROWSER_PATHS = frozenset(("/cache", "/cache/explain"))
"""Here a key may also come as the password of HTTP's Basic authentication, as browsers ask for it and send it. Only
here: a browser adds it to whatever another site makes it ask of this server, and these routes change nothing.
"""


class Keys:
    """The two keys of a server. As in SGLang, either may be missing, and what is open then depends on the other."""

    def __init__(self, api_key: str | None, admin_api_key: str | None) -> None:
        self._client = None if api_key is None else api_key.encode()
        self._admin = None if admin_api_key is None else admin_api_key.encode()

    @property
    def has_admin(self) -> bool:
        """Whether operators have a key of their own."""
        return self._admin is not None

    @property
    def exist(self) -> bool:
        """Whether any route needs a key."""
        return self._client is not None or self._admin is not None

    def check(self, path: str, headers: Headers) -> bool:
        """Whether who sends these headers is an operator; without a key for operators, everybody who may come in is.

        Raises:
            HTTPException: 401, may not come in.
        """
        given = _given(headers.get("authorization", ""), basic=path in BROWSER_PATHS)
        is_admin, is_client = _same(given, self._admin), _same(given, self._client)
        if not (is_admin or is_client or self._client is None or path in OPEN_PATHS):
            raise _refusal(path, "the API key is missing or wrong: send the header Authorization: Bearer KEY")
        return is_admin or self._admin is None


def operators_only(request: Request) -> None:
    """For routes that tell of all tenants, or touch them.

    Raises:
        HTTPException: 401, who asks is no operator.
    """
    if not request.state.is_operator:
        raise _refusal(request.url.path, "this is for operators: send admin_api_key as Authorization: Bearer KEY")


def _given(authorization: str, *, basic: bool) -> bytes:
    """The key in a header; empty if there is none."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.encode("latin-1")
    if basic and scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


def _same(given: bytes, key: bytes | None) -> bool:
    return key is not None and hmac.compare_digest(given, key)


def _refusal(path: str, message: str) -> HTTPException:
    challenge = 'Basic realm="jradix: the key as password", charset="UTF-8"' if path in BROWSER_PATHS else "Bearer"
    return HTTPException(401, message, {"WWW-Authenticate": challenge})
