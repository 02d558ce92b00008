-- An index of each tenant's records, for quotas. "tenant" is set when a record is claimed, so renewing and completing
-- are still HOT updates. Records without a tenant are not in the index and cost nothing.
--
-- Writers wait while the index is built. On a table with many records build it by hand first, with the same statement
-- and CONCURRENTLY after INDEX: then there is nothing left to do here.
CREATE INDEX IF NOT EXISTS semel_record_tenant ON semel_record (tenant) WHERE tenant <> '';
