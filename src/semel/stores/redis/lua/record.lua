-- What stands before every script of the store: how a record is read and written. See values.py for the layout.
--
-- A record is one string. Its key lives until the later of two moments, the end of the lease and the end of the ttl, and
-- far longer where something may be in doubt. The string says how much of the key's life is left at either moment, so
-- PTTL tells both, and no clock is written down: lease left = PTTL - lease_rest, time left = PTTL - ttl_rest.

local RUNNING, DONE, UNKNOWN, ABANDONED = 1, 2, 3, 4
local RETRY = 0
local FAR = 31622400000000 -- a thousand years in milliseconds: "for good", and still a PTTL to read the lease by

local function read(key)
  local value = redis.call('GET', key)
  if not value then return nil end
  local r = {}
  r.value = value
  r.version, r.state, r.takeover, r.awaited, r.token, r.nonce, r.attempt, r.created, r.lease_rest, r.ttl_rest, r.expires,
    r.size = struct.unpack('>BBBBc8c8I4c8I8I8I8I4', value)
  if r.version ~= 1 then error({err = 'ERR SEMEL the record at ' .. key .. ' is of another version'}) end
  local pttl = redis.call('PTTL', key)
  r.left = pttl - r.ttl_rest
  r.lease_left = pttl - r.lease_rest
  return r
end

local function microseconds()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end

-- Tokens are eight bytes, compared as such; as numbers they are exact up to 2^53, which microseconds reach in 2255.
local function next_token(token)
  return struct.pack('>I8', math.max(struct.unpack('>I8', token) + 1, microseconds()))
end

-- How long the key lives, and the two rests, for a lease and a ttl that end in so many milliseconds.
local function times(keep, lease_left, left)
  local life = math.max(lease_left, left)
  if keep then life = math.max(life, 0) + FAR end
  return life, life - lease_left, life - left
end

local function head(r)
  return struct.pack('>BBBBc8c8I4c8I8I8I8I4', 1, r.state, r.takeover, r.awaited, r.token, r.nonce, r.attempt, r.created,
    r.lease_rest, r.ttl_rest, r.expires, r.size)
end

local function names(r) -- fingerprint, tenant, operation, key: what never changes
  return string.sub(r.value, 61, 60 + r.size)
end

local function rest(r) -- the steps
  return string.sub(r.value, 61 + r.size)
end

local function finish(key, r, snapshot, ttl)
  r.state, r.lease_rest, r.ttl_rest, r.expires = DONE, 0, 0, microseconds() + ttl * 1000
  local awaited = r.awaited
  r.awaited = 0
  redis.call('SET', key, head(r) .. names(r) .. snapshot, 'PX', string.format('%.0f', ttl))
  r.awaited = awaited
end

-- Those who wait have marked the record. A refusal (an ACL without the channel) must not undo what was done.
local function wake(r, key, channel)
  if r.awaited == 1 then redis.pcall('PUBLISH', channel, key) end
end

-- A write that changes nothing: an Op said again on a new connection is waited for (WAIT) like the first.
local function touch(r, key, durable)
  if durable == '1' then redis.call('SETRANGE', key, 3, string.char(r.awaited)) end
end
