-- Lookup: return the record and its times.
local r = read(KEYS[1])
if not r then return false end
return {r.value, r.left, r.lease_left}
