-- Populations in millions, areas in thousand square kilometres, lengths in kilometres: rounded, for the demo only.
CREATE TABLE countries (name TEXT, capital TEXT, continent TEXT, population REAL, area INTEGER);
CREATE TABLE rivers (name TEXT, length INTEGER, country TEXT);
INSERT INTO countries VALUES
  ('Argentina', 'Buenos Aires', 'South America', 46, 2780), ('Australia', 'Canberra', 'Oceania', 26, 7692),
  ('Austria', 'Vienna', 'Europe', 9, 84), ('Brazil', 'Brasilia', 'South America', 203, 8516),
  ('Canada', 'Ottawa', 'North America', 40, 9985), ('Chile', 'Santiago', 'South America', 20, 756),
  ('China', 'Beijing', 'Asia', 1410, 9597), ('Colombia', 'Bogota', 'South America', 52, 1142),
  ('Egypt', 'Cairo', 'Africa', 106, 1002), ('Ethiopia', 'Addis Ababa', 'Africa', 126, 1104),
  ('Fiji', 'Suva', 'Oceania', 0.9, 18), ('Finland', 'Helsinki', 'Europe', 5.6, 338),
  ('France', 'Paris', 'Europe', 66, 544), ('Germany', 'Berlin', 'Europe', 84, 358),
  ('Ghana', 'Accra', 'Africa', 34, 239), ('Greece', 'Athens', 'Europe', 10.4, 132),
  ('Iceland', 'Reykjavik', 'Europe', 0.4, 103), ('India', 'New Delhi', 'Asia', 1429, 3287),
  ('Indonesia', 'Jakarta', 'Asia', 278, 1905), ('Italy', 'Rome', 'Europe', 59, 302),
  ('Japan', 'Tokyo', 'Asia', 124, 378), ('Kenya', 'Nairobi', 'Africa', 55, 580),
  ('Mexico', 'Mexico City', 'North America', 128, 1964), ('Morocco', 'Rabat', 'Africa', 38, 447),
  ('Nepal', 'Kathmandu', 'Asia', 31, 147), ('New Zealand', 'Wellington', 'Oceania', 5.2, 268),
  ('Nigeria', 'Abuja', 'Africa', 224, 924), ('Norway', 'Oslo', 'Europe', 5.5, 385),
  ('Panama', 'Panama City', 'North America', 4.5, 75), ('Peru', 'Lima', 'South America', 34, 1285),
  ('Poland', 'Warsaw', 'Europe', 37, 313), ('Portugal', 'Lisbon', 'Europe', 10.6, 92),
  ('Samoa', 'Apia', 'Oceania', 0.2, 3), ('Spain', 'Madrid', 'Europe', 48, 506),
  ('Sweden', 'Stockholm', 'Europe', 10.5, 450), ('Thailand', 'Bangkok', 'Asia', 72, 513),
  ('Turkey', 'Ankara', 'Asia', 85, 784), ('Uruguay', 'Montevideo', 'South America', 3.4, 176),
  ('Vietnam', 'Hanoi', 'Asia', 100, 331), ('Zambia', 'Lusaka', 'Africa', 20, 753);
INSERT INTO rivers VALUES
  ('Amazon', 6400, 'Brazil'), ('Blue Nile', 1450, 'Ethiopia'), ('Chao Phraya', 372, 'Thailand'),
  ('Clutha', 338, 'New Zealand'), ('Danube', 350, 'Austria'), ('Darling', 1472, 'Australia'), ('Douro', 897, 'Portugal'),
  ('Ebro', 930, 'Spain'), ('Elbe', 727, 'Germany'), ('Fraser', 1375, 'Canada'), ('Ganges', 2525, 'India'),
  ('Glomma', 621, 'Norway'), ('Kizilirmak', 1355, 'Turkey'), ('Loire', 1006, 'France'),
  ('Mackenzie', 1738, 'Canada'), ('Magdalena', 1528, 'Colombia'), ('Murray', 2508, 'Australia'), ('Niger', 1170, 'Nigeria'),
  ('Nile', 1530, 'Egypt'), ('Oder', 742, 'Poland'), ('Po', 652, 'Italy'), ('Red River', 510, 'Vietnam'),
  ('Rhone', 545, 'France'), ('Salado', 2000, 'Argentina'), ('Shinano', 367, 'Japan'), ('Tana', 1000, 'Kenya'),
  ('Tiber', 405, 'Italy'), ('Ucayali', 1600, 'Peru'), ('Vistula', 1022, 'Poland'), ('Volta', 1500, 'Ghana'),
  ('Yangtze', 6300, 'China'), ('Yellow River', 5464, 'China'), ('Zambezi', 1080, 'Zambia');
