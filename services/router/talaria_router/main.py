"""Entry point of the router. Pure."""

from __future__ import annotations

from talaria_common.service import Context, Service
from talaria_router.config import RouterConfig
from talaria_router.service import RouterService


def create(context: Context) -> Service:
    """A router with its settings, not started."""
    return RouterService(context, context.settings.section("router", RouterConfig))
