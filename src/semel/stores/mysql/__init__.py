"""Records in MySQL 8 or MariaDB 10.6+, by PyMySQL or asyncmy. Make the tables first: ``semel migrate mysql://…``."""

from semel.stores.mysql.aio import AsyncMySQLStore, check_async, migrate_async, risks_async
from semel.stores.mysql.sync import MySQLStore, check, migrate, risks

__all__ = ["AsyncMySQLStore", "MySQLStore", "check", "check_async", "migrate", "migrate_async", "risks", "risks_async"]
