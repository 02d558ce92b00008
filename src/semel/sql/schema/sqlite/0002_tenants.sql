-- An index of each tenant's records, for quotas. Records without a tenant are not in it and cost nothing.
CREATE INDEX semel_record_tenant ON semel_record (tenant) WHERE tenant <> '';
