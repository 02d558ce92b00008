-- Claim, when SET NX GET has found a running record. If its lease is over, take it over or mark it unknown; otherwise
-- return it. ARGV: the record as a first claim would write it, the life of its key in ms, the wake-up channel.
local key, fresh, life = KEYS[1], ARGV[1], ARGV[2]
local r = read(key)
if not r then
  redis.call('SET', key, fresh, 'PX', life)
  return {1, string.sub(fresh, 5, 12), 1, ''}
end
local abandoned = r.state == RUNNING and r.lease_left <= 0
if r.state == RUNNING and not abandoned and r.nonce == string.sub(fresh, 13, 20) then
  return {1, r.token, r.attempt, rest(r)}
end
local mine, theirs = struct.unpack('>Bc0', fresh, 61), struct.unpack('>Bc0', r.value, 61)
if not abandoned or (mine ~= '' and theirs ~= '' and mine ~= theirs) then
  return {0, r.value, r.left, r.lease_left}
end
local takeover = string.byte(fresh, 3)
if takeover == 2 or (takeover == RETRY and r.takeover == RETRY) then
  local n = {}
  n.version, n.state, n.takeover, n.awaited, n.token, n.nonce, n.attempt, n.created, n.lease_rest, n.ttl_rest, n.expires =
    struct.unpack('>BBBBc8c8I4c8I8I8I8', fresh)
  n.awaited, n.token, n.attempt, n.created, n.size = r.awaited, next_token(r.token), r.attempt + 1, r.created, r.size
  redis.call('SET', key, head(n) .. names(r) .. rest(r), 'PX', life)
  return {1, n.token, n.attempt, rest(r)}
end
r.state, r.expires = UNKNOWN, microseconds() + r.left * 1000
local lease_left = r.lease_left
life, r.lease_rest, r.ttl_rest = times(true, lease_left, r.left)
redis.call('SET', key, head(r) .. names(r) .. rest(r), 'PX', string.format('%.0f', life))
wake(r, key, ARGV[3])
return {0, head(r) .. names(r), r.left, lease_left}
