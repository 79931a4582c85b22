"""Many tenants over HTTP: the server's parts and what server and client share."""
