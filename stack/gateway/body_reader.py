"""Reader of a request body, bounded by the limits of the request, the team and the gateway.

Invariant: a body that is refused for its size, its encoding or its team's limit is not read."""

from __future__ import annotations

import io

from stack.gateway.client_request import BrokenBody
from stack.gateway.refusals import RETRY_MESSAGES, RequestEnd, too_large_end
from stack.gateway.response_writer import ResponseWriter

SMALL_BYTES = 16 << 10  # a body up to this costs no more than its connection does, and is not counted


class BodyReader(ResponseWriter):
    """The body of one request. A base class of RequestHandler and no object of its own."""

    async def _body(self) -> bytes:
        """The whole request body. Raises RequestEnd when it is too large or broken."""
        request, limit = self._request, self._services.limits.body_bytes
        if (request.content_length or 0) > limit:
            raise too_large_end(limit)
        if "Content-Encoding" in request.headers and (request.owes_body or request.body_bytes):
            self._refuse_encoded()
        # it came along with its head, as nearly always
        if request.complete:
            body = request.take_body()
            self._hold(len(body))
            return body
        if self._admitted:
            self._refuse_at_limit(self._x.team or "")
        self._allow("body_timeout", self._services.timeouts.body_s)
        if request.headers.get("Expect", "").lower() == "100-continue":
            request.expect_body()
        whole, size = io.BytesIO(), 0  # grows in place: to join 32 MiB of pieces takes up to 40 ms
        try:
            while piece := await request.body_piece():
                size += len(piece)
                self._hold(size)
                whole.write(piece)
        except BrokenBody as error:
            raise RequestEnd(
                "bad_body", "the body broke HTTP's own framing (chunks, length, encoding) before it was complete"
            ) from error
        return whole.getvalue()

    def _refuse_encoded(self) -> None:
        """Raise RequestEnd for an encoded body: no engine decodes it, and its size and fields would be unknown."""
        codings = ",".join(self._request.headers.getall("Content-Encoding"))
        if {coding.strip().lower() for coding in codings.split(",")} - {"", "identity"}:
            raise RequestEnd(
                "bad_body", f"no engine decodes Content-Encoding {codings[:60]!r}; send the body without it", status=415
            )

    def _refuse_at_limit(self, team: str) -> None:
        """Raise RequestEnd for a team that may send nothing more now; its body need not come, nor be read."""
        admission, x = self._services.admission, self._x
        if admission.at_limit(team):
            x.priority = self._terms.team(team).band
            raise RequestEnd("team_limit", RETRY_MESSAGES["team_limit"].format(team=team), admission.wait_s(team))

    def _hold(self, size: int) -> None:
        """Its body has so many bytes by now. Raises RequestEnd for more than one may have, or than are left to be
        held."""
        if size > (limit := self._services.limits.body_bytes):
            raise too_large_end(limit)
        if size > SMALL_BYTES:
            if not self._services.bodies.take(
                self._x.team, size - self._taken, alone=len(self._terms.policy.teams) == 1
            ):
                raise RequestEnd("bodies_full")
            self._taken = size
