"""Inference queue: many tenants' observations, one backbone pass per compatible group, each tenant's own head.

::

    client(tenant A) --.   requests of one sharing_key:               decode per (tenant, version, mode):
    client(tenant B) --+-- all in, B or T --> one backbone call --+--> head A v7, sampling      --> answer A
    client(tenant C) --'                                          `--> head B v3, deterministic --> answer B

A request is a TensorDict ``[N]`` (N rows: a collector's environments). When it is served: see
:class:`~.server.TenantInferenceServer`. It is answered as soon as its own rows are decoded. Another tenant's exception
or bad shape never fails it. Random numbers come with the request, so a sample depends on its tenant's generator only.
One worker thread serves: a slow head delays the requests decoded after it in the same batch.
"""
