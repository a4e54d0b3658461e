"""What `make bench-gateway` compares with: pass-throughs that do nothing but pass on. Run as `bench_gateway_peers.py
KIND PORT UPSTREAM`.

aiohttp is the floor: the libraries of our gateway without any of its work. httpx stands for what one writes first:
Starlette on uvicorn, and the client that most proxies use; each with its fast parts (uvloop, httptools) and without
limits or logs."""

from __future__ import annotations

import sys

_HOP = frozenset(("connection", "keep-alive", "transfer-encoding", "host", "content-length", "accept-encoding"))


def aiohttp_floor(port: int, upstream: str) -> None:
    import asyncio

    import aiohttp
    import uvloop
    from aiohttp import web

    async def main() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session:

            async def handle(request: web.BaseRequest) -> web.StreamResponse:
                body = await request.read()
                headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP]
                async with session.request(
                    request.method, upstream + request.path_qs, data=body or None, headers=headers
                ) as answer:
                    back = [(name, value) for name, value in answer.headers.items() if name.lower() not in _HOP]
                    if answer.content_type != "text/event-stream":
                        return web.Response(status=answer.status, headers=back, body=await answer.read())
                    response = web.StreamResponse(status=answer.status, headers=back)
                    await response.prepare(request)
                    while chunk := await answer.content.readany():
                        await response.write(chunk)
                    await response.write_eof()
                    return response

            runner = web.ServerRunner(web.Server(handle, access_log=None))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            await asyncio.Event().wait()

    uvloop.run(main())


def httpx_starlette(port: int, upstream: str) -> None:
    import httpx
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None, max_keepalive_connections=None))  # noqa: S113  # the load has an end of its own

    async def handle(request: Request) -> Response:
        headers = [(name, value) for name, value in request.headers.items() if name not in _HOP]
        asked = client.build_request(
            request.method, upstream + request.url.path, content=await request.body(), headers=headers
        )
        answer = await client.send(asked, stream=True)
        back = {name: value for name, value in answer.headers.items() if name not in _HOP}
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            try:
                return Response(await answer.aread(), answer.status_code, back)
            finally:
                await answer.aclose()

        async def stream():
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:
                await answer.aclose()

        return StreamingResponse(stream(), answer.status_code, back)

    app = Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST"])])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False, loop="uvloop", http="httptools")


if __name__ == "__main__":
    {"aiohttp": aiohttp_floor, "httpx": httpx_starlette}[sys.argv[1]](int(sys.argv[2]), sys.argv[3])
