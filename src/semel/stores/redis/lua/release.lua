#!lua flags=allow-oom
-- Release. ARGV: token, the state to leave the record in (0 absent, 4 abandoned, 3 unknown), the wake-up channel.
local key, to = KEYS[1], tonumber(ARGV[2])
local r = read(key)
if not r or r.token ~= ARGV[1] or r.state == DONE then return 0 end
if r.state == UNKNOWN and to == ABANDONED then return 0 end
if to == 0 then
  redis.call('DEL', key)
elseif r.state ~= UNKNOWN then
  local keep = to == UNKNOWN or r.takeover ~= RETRY
  local life, lease_rest, ttl_rest = times(keep, 0, r.left)
  if to == ABANDONED and not keep and r.left <= 0 then
    redis.call('DEL', key) -- abandoned, past its ttl, and may be run again: the same as absent
  else
    if to == UNKNOWN then
      r.state, r.expires = UNKNOWN, microseconds() + r.left * 1000
    else
      r.token = next_token(r.token) -- a renewal that is still under way must not revive it
    end
    local awaited = r.awaited
    r.lease_rest, r.ttl_rest, r.awaited = lease_rest, ttl_rest, 0
    redis.call('SETRANGE', key, 0, head(r))
    redis.call('PEXPIRE', key, string.format('%.0f', life))
    r.awaited = awaited
  end
end
wake(r, key, ARGV[3])
return 1
