"""Network: HTTP servers and clients with TLS, authentication and bounds."""
