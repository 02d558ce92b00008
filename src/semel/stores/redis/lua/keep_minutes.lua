-- Keep the counts of one writer in one minute. A count that is not greater than the one that is there is an older one.
-- ARGV: seconds to keep the minute; then field, count and kinds of each route.
for i = 2, #ARGV, 3 do
  local known = redis.call('HGET', KEYS[1], ARGV[i])
  if not known or tonumber(string.match(known, '^%d+')) < tonumber(ARGV[i + 1]) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1] .. ' ' .. ARGV[i + 2])
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
