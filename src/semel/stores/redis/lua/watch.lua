#!lua flags=allow-oom
-- Before waiting: mark the record, so that whoever ends the attempt tells. Answers the lease left in ms, -1 if none runs.
local key = KEYS[1]
local r = read(key)
if not r or r.state ~= RUNNING or r.lease_left <= 0 then return -1 end
if r.awaited == 0 then redis.call('SETRANGE', key, 3, '\1') end
return r.lease_left
