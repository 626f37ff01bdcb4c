"""Entry point of admission. Pure."""

from __future__ import annotations

from talaria_admission.config import AdmissionConfig
from talaria_admission.service import AdmissionService
from talaria_common.service import Context, Service


def create(context: Context) -> Service:
    """Admission with its settings, not started."""
    return AdmissionService(context, context.settings.section("admission", AdmissionConfig))
