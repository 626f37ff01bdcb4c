"""Entry point of the gateway. Pure."""

from __future__ import annotations

from talaria_common.service import Context
from talaria_gateway.config import GatewayConfig
from talaria_gateway.service import GatewayService


def create(context: Context) -> GatewayService:
    """The gateway of this process."""
    return GatewayService(context, context.settings.section("gateway", GatewayConfig))
