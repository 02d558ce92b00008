-- Shared by the scripts of the store: how a record is read and written. See layout.py for the layout.
--
-- A record is one string. Its key lives until the lease and the ttl are both over, and far longer if the outcome may be
-- unknown. The string says how much of the key's life is left when the lease ends and when the ttl ends. So PTTL gives
-- both, and no clock is stored: lease left = PTTL - lease_rest, time left = PTTL - ttl_rest.

local RUNNING, DONE, UNKNOWN, ABANDONED = 1, 2, 3, 4
local RETRY = 0
local FAR = 31622400000000 -- a thousand years in milliseconds: practically for ever, and PTTL still gives the lease

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

-- Tokens are eight bytes and compared as bytes. As numbers they are exact up to 2^53 microseconds, the year 2255.
local function next_token(token)
  return struct.pack('>I8', math.max(struct.unpack('>I8', token) + 1, microseconds()))
end

-- Return the life of the key and the two rests, for a lease and a ttl that end in so many milliseconds.
local function times(keep, lease_left, left)
  local life = math.max(lease_left, left)
  if keep then life = math.max(life, 0) + FAR end
  return life, life - lease_left, life - left
end

local function head(r)
  return struct.pack('>BBBBc8c8I4c8I8I8I8I4', 1, r.state, r.takeover, r.awaited, r.token, r.nonce, r.attempt, r.created,
    r.lease_rest, r.ttl_rest, r.expires, r.size)
end

local function names(r) -- fingerprint, tenant, operation, key: they never change
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

-- Waiters have marked the record. pcall: if an ACL forbids the channel, the write must not be undone.
local function wake(r, key, channel)
  if r.awaited == 1 then redis.pcall('PUBLISH', channel, key) end
end

-- Write without a change, so that WAIT also covers an Op that is sent again on a new connection.
local function touch(r, key, durable)
  if durable == '1' then redis.call('SETRANGE', key, 3, string.char(r.awaited)) end
end
