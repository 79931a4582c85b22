"""The served application on a port of this machine, and a network that fails as planned; for tests."""

from __future__ import annotations

import socket
import threading
import time

import httpx
import uvicorn

from nexus_lightning.client import NexusClient


class Faults(httpx.BaseTransport):
    """FAKE network. Each entry of ``plan`` befalls one request: ``lost`` (carried out, answer lost), ``refused`` (not
    sent), or an answer that comes without the server having seen it. ``sent`` are the requests that got through."""

    def __init__(self):
        self.plan, self.sent, self.inner = [], [], httpx.HTTPTransport()

    def handle_request(self, request):
        fault = self.plan.pop(0) if self.plan else None
        if fault == "refused":
            raise httpx.ConnectError("refused", request=request)
        if isinstance(fault, httpx.Response):
            return fault
        self.sent.append(request)
        response = self.inner.handle_request(request)
        if fault == "lost":
            response.read()
            response.close()
            raise httpx.ReadError("connection reset", request=request)
        return response

    def close(self):
        self.inner.close()


class Server:
    """The served application on a port of this machine."""

    def __init__(self, served):
        self.served, self.master = served, served.master
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as scripts/serve.py does
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(served.app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run, args=([listener],), daemon=True)
        self.thread.start()
        while not self.uvicorn.started:
            time.sleep(0.01)
        self.clients = []

    def client(self, who="alice", **options):
        client = NexusClient(self.url, self.served.tokens[who], **{"retry_s": 10.0, **options})
        faults = Faults()
        transport = client._transport
        transport._client = httpx.Client(transport=faults, **transport._options)
        client.faults = faults
        self.clients.append(client)
        return client

    def stop(self):
        for client in self.clients:
            client.close()
        self.uvicorn.should_exit = True
        self.thread.join()
