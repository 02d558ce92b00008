#!lua flags=allow-oom
-- Resolve. ARGV: 1 with a snapshot, 0 without; the snapshot; ttl in ms; 1 to overrule a live attempt; the channel; the
-- token that the record must have, which may then be done, or ''; a digit for each state that it may be in, or ''.
local key = KEYS[1]
local r = read(key)
if not r or (ARGV[6] ~= '' and ARGV[6] ~= r.token) then return 0 end
local state = r.state
if state == RUNNING and r.lease_left <= 0 then state = ABANDONED end
if ARGV[7] ~= '' and not string.find(ARGV[7], tostring(state), 1, true) then return state end
if state == DONE and (ARGV[6] == '' or ARGV[1] == '1') then return state end
if state == RUNNING and ARGV[4] ~= '1' then return state end
if ARGV[1] == '0' then
  redis.call('DEL', key)
else
  r.token = next_token(r.token) -- if the lost owner comes back, its token is stale
  finish(key, r, ARGV[2], tonumber(ARGV[3]))
end
wake(r, key, ARGV[5])
return state
