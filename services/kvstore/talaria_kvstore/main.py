"""Entry point of the kvstore service. Pure."""

from __future__ import annotations

from talaria_common.service import Context, Service
from talaria_kvstore.config import KvstoreConfig
from talaria_kvstore.service import KvstoreService


def create(context: Context) -> Service:
    """The service with its settings, not started."""
    return KvstoreService(context, context.settings.section("kvstore", KvstoreConfig))
