"""Rules for many tenants on one engine. A request says whose it is by `labels={"tenant": "..."}`."""
