"""The schema of a tuning database, as named steps. A released step never changes; a new schema is one more step."""

from __future__ import annotations

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

APPLICATION_ID = 0x41444953  # "ADIS", so that another program's file is told apart

migrations = Migrations("autodispatch")


@migrations(name="m001_initial")
def m001_initial(db: Database) -> None:
    for statement in INITIAL:
        db.execute(statement)


@migrations(name="m002_ties")
def m002_ties(db: Database) -> None:
    for statement in TIES:
        db.execute(statement)


@migrations(name="m003_views")
def m003_views(db: Database) -> None:
    for statement in VIEWS:
        db.execute(statement)


STEPS = ("m001_initial", "m002_ties", "m003_views")
SCHEMA_VERSION = len(STEPS)

_PROBLEM = """
  m INTEGER NOT NULL, n INTEGER NOT NULL, k INTEGER NOT NULL,
  dtype TEXT NOT NULL, layout TEXT NOT NULL, alignment INTEGER NOT NULL,
  activation TEXT NOT NULL, precision TEXT NOT NULL, math TEXT NOT NULL"""

INITIAL = (
    """CREATE TABLE devices (
  key TEXT PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, compute_capability TEXT NOT NULL,
  sm_count INTEGER NOT NULL, memory_gib INTEGER NOT NULL, mig_profile TEXT NOT NULL,
  l2_bytes INTEGER NOT NULL, shared_bytes_per_block INTEGER NOT NULL, clock_khz INTEGER NOT NULL,
  bandwidth REAL NOT NULL
) STRICT""",
    """CREATE TABLE environments (
  id TEXT PRIMARY KEY, python TEXT NOT NULL, numpy TEXT NOT NULL, autodispatch TEXT NOT NULL,
  platform TEXT NOT NULL, driver TEXT NOT NULL, cuda_runtime TEXT NOT NULL, nvrtc TEXT NOT NULL, cupy TEXT NOT NULL
) STRICT""",
    """CREATE TABLE sessions (
  id TEXT PRIMARY KEY, device_key TEXT NOT NULL REFERENCES devices(key),
  environment_id TEXT NOT NULL REFERENCES environments(id), started_at TEXT NOT NULL, host TEXT NOT NULL,
  command TEXT NOT NULL, protocol_version INTEGER NOT NULL
) STRICT""",
    f"""CREATE TABLE measurements (
  id TEXT PRIMARY KEY, session_id TEXT NOT NULL REFERENCES sessions(id),
  device_key TEXT NOT NULL REFERENCES devices(key),{_PROBLEM},
  regime TEXT NOT NULL, stage TEXT NOT NULL, variant TEXT NOT NULL, config TEXT NOT NULL, digest TEXT NOT NULL,
  status TEXT NOT NULL, reason TEXT NOT NULL,
  median_us REAL CHECK (median_us > 0), p20_us REAL CHECK (p20_us > 0), p80_us REAL CHECK (p80_us > 0),
  mad_us REAL CHECK (mad_us >= 0), samples_us TEXT NOT NULL,
  relative_error REAL, max_error REAL, registers INTEGER, spill_bytes INTEGER, shared_bytes INTEGER,
  workspace_bytes INTEGER NOT NULL, clock_mhz INTEGER, temperature_c INTEGER, measured_at TEXT NOT NULL,
  CHECK (status <> 'ok' OR median_us IS NOT NULL)
) STRICT""",
    """CREATE INDEX measurements_by_problem ON measurements
  (device_key, n, k, dtype, layout, m)""",
    f"""CREATE TABLE decisions (
  device_key TEXT NOT NULL REFERENCES devices(key),{_PROBLEM},
  regime TEXT NOT NULL, leader TEXT NOT NULL REFERENCES measurements(id), finalists TEXT NOT NULL,
  session_id TEXT NOT NULL REFERENCES sessions(id), decided_at TEXT NOT NULL,
  PRIMARY KEY (device_key, n, k, dtype, layout, alignment, activation, precision, math, regime, m)
) STRICT""",
    f"""CREATE TABLE misses (
  device_key TEXT NOT NULL,{_PROBLEM},
  count INTEGER NOT NULL, last_seen TEXT NOT NULL,
  PRIMARY KEY (device_key, n, k, dtype, layout, alignment, activation, precision, math, m)
) STRICT""",
)

TIES = (
    "ALTER TABLE decisions ADD COLUMN ties TEXT NOT NULL DEFAULT '[]'",
    "ALTER TABLE decisions ADD COLUMN complete INTEGER NOT NULL DEFAULT 1 CHECK (complete IN (0, 1))",
)

_SHAPE = "d.m, d.n, d.k, d.dtype, d.layout, d.activation, d.precision, d.math, d.alignment, d.regime"

VIEWS = (
    f"""CREATE VIEW winners AS
SELECT d.device_key AS device, {_SHAPE},
  w.variant, w.config, w.median_us, round(4e-6 * d.m * d.n * d.k / w.median_us, 1) AS tflops,
  w.relative_error, json_array_length(d.ties) AS tied, d.complete, d.decided_at, s.host, s.command
FROM decisions AS d JOIN measurements AS w ON w.id = d.leader JOIN sessions AS s ON s.id = d.session_id""",
    f"""CREATE VIEW finals AS
SELECT d.device_key AS device, {_SHAPE},
  f.variant, f.config, f.median_us, round(f.median_us / w.median_us, 3) AS slowdown, f.id = d.leader AS is_winner,
  f.p20_us, f.p80_us, f.relative_error, f.registers, f.shared_bytes, f.workspace_bytes, f.clock_mhz, f.temperature_c
FROM decisions AS d JOIN measurements AS w ON w.id = d.leader, json_each(d.finalists) AS i
  JOIN measurements AS f ON f.id = i.value""",
    """CREATE VIEW failures AS
SELECT device_key AS device, m, n, k, dtype, layout, variant, config, status, reason, measured_at
FROM measurements WHERE status <> 'ok'""",
)
