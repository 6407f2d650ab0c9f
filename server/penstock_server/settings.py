"""Settings of the control plane. Environment variables start with `PENSTOCK_SERVER_`.

Everything that the server writes lies under `state_dir`; a user who can read that folder is an administrator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, IPvAnyNetwork, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Where the server listens, where it keeps its state, its time limits, how much it stores."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_SERVER_", extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(7080, ge=0, le=65535, description="0: any free port")
    state_dir: Path = Field(default_factory=lambda: Path.home() / ".penstock" / "server")
    standby: bool = Field(
        False, description="if another server has the state folder or the database: wait for it, and pass requests on"
    )
    advertise_host: str | None = Field(
        None, description="name or address at which standbys reach this server; default: that it listens on"
    )
    database_url: str | None = Field(None, description="postgresql+asyncpg://…; default: SQLite in state_dir")
    static_dir: Path | None = Field(None, description="built dashboard; default: the packaged one, else web/dist")
    allowed_origins: list[str] = Field(
        default_factory=list, description="further origins a browser may use, e.g. https://penstock.example.org"
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="further names of this server that a browser may use, e.g. penstock.example.org",
    )
    trusted_proxies: list[IPvAnyNetwork] = Field(
        default_factory=list,
        description="addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed",
    )
    webhook_allow: list[IPvAnyNetwork] = Field(
        default_factory=list, description="networks that webhooks may go to though they are not public: 10.1.0.0/16"
    )
    tls_cert: Path | None = Field(None, description="certificate chain (PEM); with it the server speaks HTTPS")
    tls_key: Path | None = Field(None, description="private key of tls_cert (PEM)")
    tls_client_ca: Path | None = Field(
        None, description="authority (PEM) of client certificates; with it each agent needs one that names its node"
    )
    tls_client_required: Literal["agents", "all"] = Field(
        "agents", description="who needs a certificate of tls_client_ca; all: browsers and commands, too"
    )
    insecure: bool = Field(False, description="serve plain HTTP although other machines can reach the address")
    request_head_s: float = Field(10.0, gt=0, description="how long a connection may take for the head of a request")
    requests_per_s: float = Field(
        200.0, gt=0, description="with one token, of which ten seconds' worth may come at once; more get 429"
    )

    lease_ttl_s: float = Field(15.0, gt=0)
    grace_s: float = Field(60.0, ge=0, description="how long replicas outlive a lost lease")
    tick_s: float = Field(0.5, gt=0, description="how often leases and time limits are looked at")
    stop_patience_s: float = Field(30.0, gt=0, description="beyond stop_grace_s, until a silent replica counts as lost")
    pserver_grace_s: float = Field(10.0, ge=0, description="how long pservers may outlive trainers that all succeeded")
    metrics_flush_s: float = Field(0.25, gt=0)

    max_body_bytes: int = Field(1 << 20, ge=1024)
    max_snapshot_bytes: int = Field(64 << 20, ge=1024)
    log_quota_bytes: int = Field(64 << 20, ge=1024, description="of each replica")
    segment_bytes: int = Field(4 << 20, ge=4096)
    segment_quota_bytes: int = Field(512 << 20, ge=4096, description="of each job; the oldest segments go first")
    telemetry_quota_bytes: int = Field(
        64 << 30, ge=4096, description="of recorded frames of all jobs; of jobs that have ended the oldest go first"
    )
    retain_telemetry_days: float = Field(90.0, gt=0, description="recorded frames, after the end of a job")
    retain_logs_days: float | None = Field(None, gt=0, description="after the end of a job; unset: for ever")
    retain_metrics_days: float | None = Field(None, gt=0)
    retain_events_days: float | None = Field(None, gt=0)
    retain_snapshots_days: float | None = Field(None, gt=0, description="after the upload")
    retain_audit_days: float = Field(365.0, gt=0, description="after the request")
    browser_high_water_bytes: int = Field(1 << 20, ge=1024)
    browser_limit_bytes: int = Field(4 << 20, ge=1024)
    browser_slow_s: float = Field(5.0, gt=0)

    otlp_endpoint: str | None = Field(
        None,
        pattern="^https?://[^/]",
        description="collector of OpenTelemetry that gets a trace of each job, e.g. http://127.0.0.1:4318",
    )
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Settings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key are given together, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key: without HTTPS no client shows a certificate")
        if self.tls_client_required == "all" and self.tls_client_ca is None:
            raise ValueError("tls_client_required is 'all', but no tls_client_ca says whose certificates are good")
        return self

    @property
    def url(self) -> str:
        """Return the database URL, with an async driver."""
        given = self.database_url
        if given is None:
            return f"sqlite+aiosqlite:///{self.state_dir / 'penstock.db'}"
        for scheme in ("postgresql://", "postgres://"):
            if given.startswith(scheme):
                return "postgresql+asyncpg://" + given.removeprefix(scheme)
        if given.startswith("sqlite:///"):
            return "sqlite+aiosqlite:///" + given.removeprefix("sqlite:///")
        return given
