-- Sweep one record: if it was abandoned past its time and must not be run again, mark it unknown. It stays.
local key = KEYS[1]
local r = read(key)
if not r or r.state ~= RUNNING or r.takeover == RETRY or r.lease_left > 0 or r.left > 0 then return 0 end
r.state, r.expires = UNKNOWN, microseconds() + r.left * 1000
redis.call('SETRANGE', key, 0, head(r))
return 1
